"""Prints README's table of GPU times from the figures that bench_kernels.py wrote.

python benchmarks/table.py benchmarks/results/kernels-h200.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# How many times as fast as vLLM, in a graph; the rest of prefill has no target, decode is to be as fast.
TARGETS = {
    "gated_delta_rule": {"1 x 8192": 1.8, "8 x 1024": 3, "64 x 128": 5},
    "kda": {"1 x 8192": 2, "8 x 1024": 2.8, "64 x 128": 3.5},
    "ssd": {"1 x 8192": 2.2, "8 x 1024": 3, "64 x 128": 3.5},
    "selective_scan": {"1 x 8192": 4, "8 x 1024": 12, "64 x 128": 80},
}
HEAD = (
    "| op | case | graph: ours | vLLM | ratio | to reach | eager: ours | vLLM | floor | copy |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def microseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def line(graph: dict, eager: dict) -> str:
    op, case = graph["op"], graph["case"]
    target = TARGETS.get(op, {}).get(case, 1 if op in TARGETS and case.startswith("batch") else None)
    ratio = f"{graph['peer_us'] / graph['ours_us']:.2f}x" if graph["peer_us"] else ""
    times = [microseconds(row[key]) for row in (graph, eager) for key in ("ours_us", "peer_us")]
    limits = [microseconds(graph[key]) for key in ("floor_us", "copy_us")]
    cells = [f"`{op}`", case, *times[:2], ratio, f"{target:g}x" if target else "", *times[2:], *limits]
    return f"| {' | '.join(cells)} |"


def table(result: dict) -> str:
    rows = [row for row in result["rows"] if row["mode"] != "host"]
    return "\n".join([HEAD, *(line(*pair) for pair in zip(rows[::2], rows[1::2], strict=True))])


def host_table(result: dict) -> str:
    rows = [row for row in result["rows"] if row["mode"] == "host"]
    lines = [f"| `{row['op']}` | {microseconds(row['ours_us'])} | {microseconds(row['peer_us'])} |" for row in rows]
    return "\n".join(["| host cost of one prefill call | ours | vLLM |\n|---|---|---|", *lines])


if __name__ == "__main__":
    figures = json.loads(Path(sys.argv[1]).read_text())
    print(table(figures), host_table(figures), sep="\n\n")
