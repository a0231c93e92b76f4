"""Draws the pictures of README.md and docs/ from committed results, for light and for dark pages.

    python benchmarks/plot.py

Needs matplotlib: pip install 'mambacache[plot]'.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from table import BOUND, REPLAYED, faster, in_order, peers_said, replayed

RESULTS = Path(__file__).parent / "results"
BAR = 0.4
OURS, PEER = "#2a8fb3", "#a9a9a9"
THEMES = {"": {}, "-dark": dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#e6e6e6")}
EDGES = {"": "#333333", "-dark": "#9a9a9a"}


def bars(axes: Axes, labels: list[str], ours: list[float], peers: list[float], texts: list[tuple[str, str]]) -> None:
    """Two horizontal bars for each label, with what stands beside them."""
    for side, (values, color) in enumerate(((ours, OURS), (peers, PEER))):
        places = [place + BAR * (side - 0.5) for place in range(len(labels))]
        axes.barh(places, values, BAR, color=color)
        for place, value, text in zip(places, values, texts, strict=True):
            axes.annotate(text[side], (value, place), xytext=(3, 0), textcoords="offset points", va="center", size=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()


def legend(figure: Figure, peer: str, ours: str = "mambacache") -> None:
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in (OURS, PEER)]
    figure.legend(handles, [ours, peer], loc="outside upper right", ncols=2, fontsize=8, frameon=False)


def kernels(result: dict[str, Any]) -> Figure:
    """A panel for each op, prefill beside decode: the share of the limit that each shape reaches."""
    rows = [row for row in result["rows"] if row["mode"] == "graph" and row["peer_us"]]
    ops = list(dict.fromkeys(row["op"] for row in rows))
    parts = [[[r for r in rows if r["op"] == op and is_decode(r) == decode] for decode in (False, True)] for op in ops]
    heights = [max(map(len, part)) + 1 for part in parts]
    figure, grid = pyplot.subplots(
        len(ops), 2, figsize=(10, 0.42 * sum(heights)), sharex=True, height_ratios=heights, layout="constrained"
    )
    for op, part, pair in zip(ops, parts, grid, strict=True):
        for kind, own, axes in zip(("prefill", "decode"), part, pair, strict=True):
            if not own:
                axes.remove()
                continue
            shares = [[100 * row["floor_us"] / row[key] for row in own] for key in ("ours_us", "peer_us")]
            texts = [(f"{row['ours_us']:,.0f} µs", peers_said(row)) for row in own]
            bars(axes, [row["case"] for row in own], *shares, texts)
            axes.axvline(100, color=pyplot.rcParams["axes.edgecolor"], linewidth=0.8)
            axes.set_xlim(0, 125)
            axes.set_title(f"{op}, {kind}", fontsize=9, loc="left")
    figure.supxlabel(f"% of what memory bandwidth, tensor cores and exponentials of one {result['gpu']} allow", size=9)
    legend(figure, f"the fastest of vLLM {result['versions']['vllm']}'s kernels and FlashInfer's")
    return figure


def is_decode(row: dict[str, Any]) -> bool:
    return row["case"].startswith("batch") or row["case"] == "256 tokens"


def against_vllm(results: dict[str, Any]) -> Figure:
    """The median of each workload, and the share of prompt tokens that it hit; vLLM as it is faster."""
    run = results["runs"][0]
    workloads = list(dict.fromkeys(row["workload"] for row in run["rows"]))
    rows = {(row["workload"], row["engine"]): row for row in run["rows"]}
    pairs = [(rows[workload, "plugin"], faster(run["rows"], workload)) for workload in workloads]
    figure, axes = pyplot.subplots(figsize=(10, 0.45 * len(workloads) + 1.2), layout="constrained")
    texts = [(said(ours), said(peer)) for ours, peer in pairs]
    bars(axes, workloads, *([row["seconds"] for row in side] for side in zip(*pairs, strict=True)), texts)
    axes.margins(x=0.15)
    axes.set_xlabel(f"seconds, all prompts together ({run['gpu']}, 12 layers of Qwen3-Next's shape)", fontsize=9)
    legend(figure, f"vLLM {run['versions']['vllm']} alone, the faster of its two prefills", "vLLM with mambacache")
    return figure


def said(row: dict[str, Any]) -> str:
    hit = f", {row['hit_tokens'] / row['prompt_tokens']:.0%} hit" if row["hit_tokens"] else ""
    return f"{row['seconds']:.2f} s{hit}"


def first_token(result: dict[str, Any]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    hits, times = zip(*((row["hit_tokens"], 1e3 * row["seconds"]) for row in result["rows"]), strict=True)
    axes.plot(hits, times, color=OURS, marker="o", markersize=4)
    axes.set_ylim(0)
    axes.set_xlabel(f"tokens hit, of a prompt of {result['prompt_tokens']:,}", fontsize=9)
    axes.set_ylabel("first token, ms", fontsize=9)
    return figure


def replay(result: dict[str, Any]) -> Figure:
    """A panel for each pair of budgets: the share of the ceiling that each policy hits, one request after the other,
    without host memory."""
    pairs = [row for row in result["rows"] if row["kv_gib"] != 0]
    rows = in_order([row for row in pairs if row["running"] == 1 and not row["host_gib"]])
    columns = list(dict.fromkeys(map(replayed, rows)))
    figure, grid = pyplot.subplots(
        1, len(columns), figsize=(2.2 * len(columns) + 1, 2.6), sharex=True, sharey=True, layout="constrained"
    )
    for column, axes in zip(columns, grid, strict=True):
        shares = {row["policy"]: 100 * row["share"] for row in rows if replayed(row) == column}
        for place, policy in enumerate(REPLAYED):
            share = shares.get(policy, 0)
            color = OURS if policy == "mambacache" else PEER
            axes.barh(place, share, 2 * BAR, facecolor="none" if policy == BOUND else color, edgecolor=color)
            text = f"{share:.0f}" if share else ""
            axes.annotate(text, (share, place), xytext=(3, 0), textcoords="offset points", va="center", size=7)
        model, _, memory = column.rpartition(", ")
        axes.set_title(f"{model}\n{memory}", fontsize=8)
    grid[0].set_yticks(range(len(REPLAYED)), REPLAYED.values(), fontsize=8)
    grid[0].invert_yaxis()
    grid[0].set_xlim(0, 118)
    figure.supxlabel("% hit, of all prompt tokens that were computed before", size=9)
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "kernels-h200": kernels,
    "vllm-h200": against_vllm,
    "first-token-cpu": first_token,
    "replay-conversation": replay,
}


def main() -> None:
    for name, draw in PICTURES.items():
        result = json.loads((RESULTS / f"{name}.json").read_text())
        for theme, colors in THEMES.items():
            frame = {"axes.edgecolor": EDGES[theme], "axes.spines.top": False, "axes.spines.right": False}
            with pyplot.rc_context({**colors, **frame, "svg.fonttype": "none", "svg.hashsalt": name}):
                figure = draw(result)
                metadata = {"Date": None}  # the same figures give the same file
                figure.savefig(RESULTS / f"{name}{theme}.svg", transparent=True, metadata=metadata)
                pyplot.close(figure)


if __name__ == "__main__":
    main()
