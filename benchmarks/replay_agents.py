"""Replay generated traffic of agents through `PrefixCache` and simulators, and print how their hits compare.

    python benchmarks/replay_agents.py [--budget 25] [--settings 200] [--odd] [--jobs 1] [--json OUT.json]

A share is of the ceiling, as in replay_trace.py, with Qwen3-Next's shape. Even settings were used for tuning, and
`--odd` leaves them out. `--budget quarter` compares mambacache with unbounded memory to mambacache with a quarter of
the states kept there, and unbounded KV.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from replay_trace import MODELS, OURS, UNBOUNDED, Run, budget_of, budget_text, load, measure
from simulators.parts import GIB
from tqdm import tqdm

MODEL = "qwen3-next"
QUARTER = "quarter"
POLICIES = (OURS, "lru-joint", "lru-ends", "vllm", "sglang", "marconi")


def shares(budget: str, setting: int) -> dict[str, float]:
    """Return the share of the ceiling that each policy hits in a setting."""
    run = Run(None, MODEL, OURS, budget, running=1, losses=False, requests=None, agents=setting)
    if budget != QUARTER:
        return {policy: measure(replace(run, policy=policy)).share for policy in POLICIES}
    unbounded = measure(replace(run, budget=UNBOUNDED))
    assert unbounded.states_kept is not None
    shape = MODELS[MODEL]
    states = unbounded.states_kept / 4 * shape.state_bytes
    kv = budget_of(UNBOUNDED, shape, load(run)[1]).kv
    quarter = measure(replace(run, budget=f"{states / GIB:.3f}+{kv / GIB:.3f}"))
    return {UNBOUNDED: unbounded.share, OURS: quarter.share}


def compare(rows: dict[int, dict[str, float]]) -> list[str]:
    """Return a line for each policy: its mean share, and mambacache's share less its share, in points."""
    lines = []
    for policy in next(iter(rows.values())):
        each = np.array([row[policy] for row in rows.values()]) * 100
        ahead = np.array([row[OURS] for row in rows.values()]) * 100 - each
        worse = np.mean(ahead < -2)
        lines.append(
            f"{policy:12} {each.mean():5.1f}   ahead: mean {ahead.mean():+.1f}, worst {ahead.min():+.1f}, "
            f"2 points behind in {worse:.0%}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=lambda text: text if text == QUARTER else budget_text(text), default="25")
    parser.add_argument("--settings", type=int, default=200, help="settings 0 to this number")
    parser.add_argument("--odd", action="store_true", help="odd settings only")
    parser.add_argument("--jobs", type=int, default=1, help="settings measured in parallel, in separate processes")
    parser.add_argument("--json", type=Path, help="file to add or replace a budget in")
    options = parser.parse_args()
    settings = range(options.odd, options.settings, 1 + options.odd)
    with ProcessPoolExecutor(options.jobs) as processes:
        measured = processes.map(partial(shares, options.budget), settings)
        rows = dict(zip(settings, tqdm(measured, options.budget, len(settings)), strict=True))
    print(*compare(rows), sep="\n")
    if options.json:
        budgets = json.loads(options.json.read_text())["budgets"] if options.json.exists() else {}
        budgets[options.budget] = [{"setting": setting} | row for setting, row in rows.items()]
        options.json.write_text(json.dumps({"budgets": budgets}, indent=1) + "\n")


if __name__ == "__main__":
    main()
