"""Times of decode over a token log beside decode as it is and vLLM's, in CUDA graphs in one run on one GPU.

    python benchmarks/token_log/bench_token_log.py [--only OP] [--warm] [--json OUT.json]

A log of 16 tokens beside each state: a step reads the state and writes none, but for rows that reach a multiple of 16
tokens and fold their log into it, one in 16 with one token a step. It is a study of kernels: no engine runs them yet.
Rows have 0 to 15 tokens in their logs, with drafts up to 17. `full` are rows with 14 that fold nothing, `empty` ones
with none. `--warm` only compiles, so that several processes may.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import log_delta
import log_ssd
import torch
from about import about
from gpu_timing import graph_us
from kernel_steps import Recurrence
from kernel_workloads import DeltaRule, KimiDelta, StateSpaceDual
from log_window import FOLD, Cursor, capacity, log_tensors, row_arrays

FAMILIES: tuple[type[Recurrence], ...] = (DeltaRule, KimiDelta, StateSpaceDual)
STEPS = ((64, 1), (256, 1), (64, 4), (256, 4))  # rows, and tokens of each
VARIANTS = ((8, 1), (16, 2), (32, 4))  # values and warps of a program
REPEATS = 9


class Logged:
    """One set of inputs, with logs of finite numbers."""

    def __init__(self, family: type[Recurrence], rows: int, tokens: int) -> None:
        self.case, self.tokens = family([tokens] * rows, decode=True), tokens
        inputs = [x for x in self.case.tensors if x is not None]
        if family is StateSpaceDual:
            x, _, _, B = inputs[:4]
            self.decode, wide, entry = log_ssd.decode, x, log_ssd.log_entry(x, B)
        else:
            k, v = inputs[1:3]
            self.decode, wide, entry = log_delta.decode, v, log_delta.log_entry(k, v, family is KimiDelta)
        size = capacity(tokens)
        self.log = log_tensors(rows + 1, {name: ((size, *shape), d) for name, (shape, d) in entry.items()}, "cuda")
        for name, each in self.log.items():
            each.normal_() if name in ("k", "u", "x", "B") else each.fill_({"norm": 0.09, "decay": 0.9}.get(name, 0.3))
        held = [i % (FOLD + 2 * (tokens > 1)) for i in range(rows)]
        self.cursors = [Cursor(FOLD, 5 * i % size, count) for i, count in enumerate(held)]
        self.inputs, self.out = inputs, torch.empty(wide.shape, dtype=wide.dtype, device="cuda")
        self.scratch = tuple(torch.empty(wide.shape[:2].numel() * 128, device="cuda") for _ in range(2))
        self.fill(self.cursors)

    def fill(self, cursors: list[Cursor]) -> None:
        src, count = self.case.steps.src.tolist(), len(cursors)
        self.rows = row_arrays(cursors, src, [self.tokens] * count, range(1, count + 1), "cuda")

    def call(self, values: int, warps: int) -> None:
        self.decode(
            *self.inputs, self.case.pool, self.log, self.rows, self.tokens, self.out, self.scratch, values, warps
        )


def measure(family: type[Recurrence], rows: int, tokens: int) -> dict[str, Any]:
    """One row of figures, in µs."""
    sets = [Logged(family, rows, tokens) for _ in range(2 if rows == 64 else 1)]
    found: dict[str, Any] = {"op": family.op, "rows": rows, "tokens": tokens}

    def time(name: str, calls: list[Callable[[], object]]) -> None:
        found[name] = graph_us(calls, REPEATS)

    time("vLLM", [next(iter(each.case.peers().values())) for each in sets])
    time("without a log", [each.case.ours for each in sets])
    if copies := [call for each in sets if (call := each.case.copy())]:
        time("copy", copies)
    for variant in VARIANTS:
        time(f"{variant[0]} values, {variant[1]} warps", [partial(each.call, *variant) for each in sets])
    for name, held in (("empty", 0), ("full", FOLD - 2)):
        for each in sets:
            each.fill([Cursor(FOLD, 0, held) for _ in range(rows)])
        time(name, [partial(each.call, *VARIANTS[0]) for each in sets])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="the op whose name holds this text")
    parser.add_argument("--warm", action="store_true", help="compile, and time nothing")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    result = about("torch", "triton") | {"rows": []}
    for family in [each for each in FAMILIES if options.only in each.op]:
        for rows, tokens in STEPS:
            if tokens > 1 and family is StateSpaceDual:
                continue  # vLLM's takes one
            if options.warm:
                logged = Logged(family, 2, tokens)
                for variant in VARIANTS:
                    logged.call(*variant)
                continue
            result["rows"].append(measure(family, rows, tokens))
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in result["rows"][-1].items()}, flush=True)
            torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
