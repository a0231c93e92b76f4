"""Times of decode over a token log beside decode as it is and vLLM's, in CUDA graphs in one run on one GPU.

    python benchmarks/token_log/bench_token_log.py [--only OP] [--warm] [--json OUT.json]

A log of 16 tokens beside each state: a step reads the state and writes none, but for rows that reach a multiple of 16
tokens, whose state and log are folded into a new state by a launch of its own. It is a study of kernels: no engine runs
them yet. The rows' tokens begin at all entries of their logs alike, so that of 16 rows with one token one is folded,
and of 13 with four. `log` is the whole of it. `--warm` only compiles, so that several processes may.
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
from log_window import FOLD, PROGRAM_TILES, Row, log_tensors, row_arrays

FAMILIES: tuple[type[Recurrence], ...] = (DeltaRule, KimiDelta, StateSpaceDual)
STEPS = ((64, 1), (256, 1), (64, 4), (256, 4))  # rows, and tokens of each
REPEATS = 9


class Logged:
    """One set of inputs, with logs of finite numbers."""

    def __init__(self, family: type[Recurrence], rows: int, tokens: int) -> None:
        self.case = family([tokens] * rows, decode=True)
        self.inputs = [x for x in self.case.tensors if x is not None]
        if family is StateSpaceDual:
            x, _, _, B = self.inputs[:4]
            self.module, self.shapes, entry = log_ssd, (x, B), log_ssd.log_entry(x, B)
        else:
            k, v = self.inputs[1:3]
            self.module, self.shapes, entry = log_delta, (k, v), log_delta.log_entry(k, v, family is KimiDelta)
        self.log = log_tensors(rows + 1, entry, "cuda")
        for name, each in self.log.items():
            each.normal_() if name in ("k", "u", "x", "B") else each.fill_({"norm": 0.09, "G": -0.9}.get(name, 0.3))
        src = self.case.steps.src.tolist()
        each = [Row(src[i], i + 1, 0, i % (FOLD + 1 - tokens), tokens, src[i]) for i in range(rows)]
        self.rows, self.mixed = {}, row_arrays(each, "cuda")
        self.sorted = row_arrays(sorted(each, key=lambda row: row.at), "cuda")
        wide = self.inputs[0] if family is StateSpaceDual else self.inputs[2]
        self.out, self.scratch = torch.empty_like(wide), self.module.scratch_of(*self.shapes)

    def decode(self, tiles: int) -> None:
        self.module.decode(*self.inputs, self.case.pool, self.log, self.rows, self.out, self.scratch, tiles)

    def fold(self) -> None:
        self.module.fold(*self.shapes, self.case.pool, self.log, self.rows)

    def both(self, rows: dict[str, torch.Tensor]) -> None:
        self.rows = rows
        self.decode(PROGRAM_TILES)
        self.fold()


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
    time("log, rows that are folded last", [partial(each.both, each.sorted) for each in sets])
    time("log", [partial(each.both, each.mixed) for each in sets])
    for tiles in (2, 4):
        time(f"prepare and decode, {tiles} tiles", [partial(each.decode, tiles) for each in sets])
    time("fold", [each.fold for each in sets])
    for each in sets:
        each.case.steps.indices.decode_dst.zero_()
    time("without a log, nothing stored", [each.case.ours for each in sets])
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
                logged.both(logged.mixed)
                continue
            result["rows"].append(measure(family, rows, tokens))
            print({k: round(v, 1) if isinstance(v, float) else v for k, v in result["rows"][-1].items()}, flush=True)
            torch.cuda.empty_cache()
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
