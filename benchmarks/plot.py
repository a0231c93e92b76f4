"""Draw the pictures of README.md and docs/ from committed results, for light and dark pages.

    python benchmarks/plot.py

It needs matplotlib: pip install 'mambacache[plot]'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from table import ROUTINGS, faster

RESULTS = Path(__file__).parent / "results"
BAR = 0.4
OURS, PEER = "#2a8fb3", "#a9a9a9"
SHADES = "#a9a9a9", "#6f6f6f", "#8fc7dc", OURS
THEMES = {"": {}, "-dark": dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#e6e6e6")}
EDGES = {"": "#333333", "-dark": "#9a9a9a"}


def bars(axes: Axes, labels: list[str], ours: list[float], peers: list[float], texts: list[tuple[str, str]]) -> None:
    """Draw two horizontal bars with texts for each label."""
    for side, (values, color) in enumerate(((ours, OURS), (peers, PEER))):
        places = [place + BAR * (side - 0.5) for place in range(len(labels))]
        axes.barh(places, values, BAR, color=color)
        for place, value, text in zip(places, values, texts, strict=True):
            axes.annotate(text[side], (value, place), xytext=(3, 0), textcoords="offset points", va="center", size=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()


def legend(figure: Figure, ours: str, peer: str) -> None:
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in (OURS, PEER)]
    figure.legend(handles, [ours, peer], loc="outside upper right", ncols=2, fontsize=8, frameon=False)


def against_vllm(run: dict[str, Any]) -> Figure:
    """Draw the median time and hit share of each workload, beside vLLM alone."""
    workloads = list(dict.fromkeys(row["workload"] for row in run["rows"]))
    rows = {(row["workload"], row["engine"]): row for row in run["rows"]}
    pairs = [(rows[workload, "plugin"], faster(run["rows"], workload)) for workload in workloads]
    figure, axes = pyplot.subplots(figsize=(10, 0.45 * len(workloads) + 1.2), layout="constrained")
    texts = [(said(ours), said(peer)) for ours, peer in pairs]
    bars(axes, workloads, *([row["seconds"] for row in side] for side in zip(*pairs, strict=True)), texts)
    axes.margins(x=0.15)
    axes.set_xlabel(f"seconds, all prompts together ({run['gpu']}, {run['model']})", fontsize=9)
    legend(figure, "vLLM with mambacache", f"vLLM {run['versions']['vllm']} alone, FlashInfer's prefill")
    return figure


def said(row: dict[str, Any]) -> str:
    hit = f", {row['hit_tokens'] / row['prompt_tokens']:.0%} hit" if row["hit_tokens"] else ""
    return f"{row['seconds']:.2f} s{hit}"


def fleet(run: dict[str, Any]) -> Figure:
    """Draw the share of prompt tokens hit and the mean time to the first token, by routing and number of replicas."""
    rows = {(row["replicas"], row["routing"]): row for row in run["rows"]}
    counts = sorted({replicas for replicas, _ in rows if replicas > 1})
    figure, sides = pyplot.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
    for number, (routing, color) in enumerate(zip(ROUTINGS, SHADES, strict=True)):
        own = [rows[count, routing] for count in counts]
        places = [place + 0.2 * (number - 1.5) for place in range(len(counts))]
        sides[0].bar(places, [100 * row["hit_tokens"] / row["prompt_tokens"] for row in own], 0.2, color=color)
        sides[1].bar(places, [row["mean"] for row in own], 0.2, color=color, label=routing)
    for axes, label in zip(sides, ("hit, % of prompt tokens", "seconds to the first token, mean"), strict=True):
        axes.set_xticks(range(len(counts)), [f"{count} replicas" for count in counts], fontsize=8)
        axes.set_ylabel(label, fontsize=9)
    figure.legend(loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    return figure


PICTURES = {"vllm-qwen3.5-9b-h100": against_vllm, "fleet": fleet}


def main() -> None:
    for name, draw in PICTURES.items():
        run = json.loads((RESULTS / f"{name}.json").read_text())
        for theme, colors in THEMES.items():
            frame = {"axes.edgecolor": EDGES[theme], "axes.spines.top": False, "axes.spines.right": False}
            with pyplot.rc_context({**colors, **frame, "svg.fonttype": "none", "svg.hashsalt": name}):
                figure = draw(run)
                metadata = {"Date": None}  # keeps the file equal for equal figures
                figure.savefig(RESULTS / f"{name}{theme}.svg", transparent=True, metadata=metadata)
                pyplot.close(figure)


if __name__ == "__main__":
    main()
