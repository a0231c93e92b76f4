"""Draws figures that benchmarks wrote: of bench_kernels.py how near the ops come to the hardware's limit, of
bench_vllm.py the seconds of each workload with the plugin and without.

    python benchmarks/plot.py RESULTS.json PICTURE.svg

Needs matplotlib: pip install 'mambacache[plot]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes

BAR = 0.4
OURS, PEER = "#1f6f8b", "#c9c9c9"
COLORS = {"ours_us": OURS, "peer_us": PEER}


def draw_bars(axes: Axes, rows: list[dict], key: str, label: str, offset: float) -> None:
    """The share of the limit that each row reaches, with its time beside the bar."""
    for place, row in enumerate(rows):
        if row[key]:
            share = 100 * row["floor_us"] / row[key]
            axes.barh(place + offset, share, BAR, color=COLORS[key], label=label)
            axes.text(share + 1, place + offset, f"{row[key]:.0f} µs", va="center", fontsize=7)
            label = ""  # one entry in the legend


def draw(result: dict, target: Path) -> None:
    peer = result["versions"]["vllm"]
    rows = [row for row in result["rows"] if row["mode"] == "graph" and (row["peer_us"] or not peer)]
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(rows) + 1.2))
    draw_bars(axes, rows, "ours_us", "mambacache", -BAR / 2)
    draw_bars(axes, rows, "peer_us", f"vLLM {peer}", BAR / 2)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['op']}, {row['case']}" for row in rows], fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xlabel("% of what memory bandwidth, tensor cores and exponentials allow")
    axes.set_title(f"{result['gpu']}, {result['copy_bytes_per_second'] / 1e12:.2f} TB/s", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", bbox_to_anchor=(0.85, 1), fontsize=8, frameon=False)
    figure.savefig(target, bbox_inches="tight")


def draw_times(run: dict, target: Path) -> None:
    """The median of each workload, with its fastest and slowest run as a line."""
    workloads = list(dict.fromkeys(row["workload"] for row in run["rows"]))
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(workloads) + 1.2))
    engines = {"plugin": ("vLLM with mambacache", OURS), "vllm": (f"vLLM {run['versions']['vllm']} alone", PEER)}
    for side, (engine, (label, color)) in enumerate(engines.items()):
        rows = {row["workload"]: row for row in run["rows"] if row["engine"] == engine}
        places = [place + BAR * (side - 0.5) for place in range(len(workloads))]
        seconds = [rows[workload]["seconds"] for workload in workloads]
        axes.barh(places, seconds, BAR, color=color, label=label)
        for place, workload in zip(places, workloads, strict=True):
            times = rows[workload]["times"]
            axes.plot([min(times), max(times)], [place, place], color="black", linewidth=0.8)
            axes.text(max(times) + 0.01, place, f"{rows[workload]['seconds']:.2f} s", va="center", fontsize=7)
    axes.set_yticks(range(len(workloads)), workloads, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds, all prompts together ({run['gpu']})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    figure.savefig(target, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    result = json.loads(options.results.read_text())
    if "runs" in result:
        draw_times(result["runs"][0], options.picture)
    else:
        draw(result, options.picture)


if __name__ == "__main__":
    main()
