"""Decode over a token log in the GPU's kernels gives each token's recurrence.

The bits are the same for any cut of the tokens into steps and any rejected drafts. Without a GPU the kernels run in
Triton's interpreter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from log_cases import BLOCKS, CASES, DEVICE, LOW, ROWS, SOURCES, TOKENS, Case, delta_rule, state_space
from mambacache.kernels import StateIndices, api, gpu, reference
from mambacache.kernels.gpu.common.launch import Launcher
from selection import full

BLANK, CHECKPOINTS, SLOTS, FIRST = (1, 2), (5, 4), (1, 2), (5, 16)  # of each row


@dataclass
class Seen:
    """Hold a row's outputs, its token log's entries, and its states by the number of tokens in them."""

    outputs: list[Tensor] = field(default_factory=list)
    logged: list[Tensor] = field(default_factory=list)
    folds: dict[int, Tensor] = field(default_factory=dict)


def run(case: Case, tokens: int, seed: int) -> list[Seen]:
    """Run steps of up to `tokens` tokens a row, with wrong tokens behind a row's accepted tokens.

    States are folded where a log is full, which begins it anew, and sometimes elsewhere.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = case.inputs[0].dtype
    state = case.state.clone()
    layout = case.log(dtype, state.dtype)
    log = [
        torch.full((1 + ROWS, *each.shape), torch.nan if each.dtype.is_floating_point else 0, dtype=each.dtype)
        for each in layout
    ]
    log = [each.to(DEVICE) for each in log]
    of_entries = sum(each.shape[0] == 16 for each in layout)  # tensors with entries; the others are a slot's own
    seen = [Seen() for _ in range(ROWS)]
    src, start, done = list(SOURCES), [first % 16 for first in FIRST], [0] * ROWS
    while min(done) < TOKENS:
        end = [(first + count) % 16 for first, count in zip(FIRST, done, strict=True)]
        lengths = [min(rng.randint(0, tokens), TOKENS - done[i], 16 - end[i]) for i in range(ROWS)]
        accepted = [rng.randint(1, length) if length else 0 for length in lengths]
        full = [e + length == 16 for e, length in zip(end, lengths, strict=True)]
        certain = [full[i] and accepted[i] == lengths[i] for i in range(ROWS)]
        dst = [
            rng.choice([BLANK[i], src[i] or BLANK[i]]) if certain[i] else CHECKPOINTS[i] * rng.choice([0, 1, full[i]])
            for i in range(ROWS)
        ]
        arrays = {"decode_src": src, "decode_dst": dst, "decode_len": lengths, "log_slot": SLOTS, "log_start": start}
        arrays |= {"log_end": end, "query_start_loc": [ROWS * tokens]}
        indices = StateIndices.from_arrays({name: np.array(x, np.int32) for name, x in arrays.items()}, DEVICE)
        poisoned = [rng.random() < 0.5 for _ in range(ROWS)]  # a NaN draft spoils no token before it
        given = [torch.full((ROWS, tokens, *x.shape[2:]), torch.nan, dtype=dtype, device=DEVICE) for x in case.inputs]
        for batch, x in zip(given, case.inputs, strict=True):
            for i, count in enumerate(accepted):
                wrong = torch.nan if poisoned[i] else torch.randn(lengths[i], *x.shape[2:]).to(batch)
                batch[i, : lengths[i]] = wrong
                batch[i, :count] = x[i, done[i] : done[i] + count]
        out = torch.full((ROWS * tokens, *case.width), torch.nan, dtype=dtype, device=DEVICE)
        before, logs_before = state.clone(), [each.clone() for each in log]
        case.run([x.flatten(0, 1) for x in given], state, log, indices, out=out)
        written = {block for block, length in zip(dst, lengths, strict=True) if block and length}
        same_bytes([state], [before], [block for block in range(BLOCKS) if block not in written])
        for i in range(ROWS):
            kept = [entry for entry in range(16) if not end[i] <= entry < end[i] + lengths[i]]
            found, wanted = ([x[SLOTS[i]] for x in each] for each in (log, logs_before))
            same_bytes(found[:of_entries], wanted[:of_entries], kept)
            if not lengths[i]:
                same_bytes(found, wanted, [*range(16)])
        for i, (result, count) in enumerate(zip(out.unflatten(0, (ROWS, tokens)), accepted, strict=True)):
            assert not result[lengths[i] :].any()
            seen[i].outputs.append(result[:count])
            entries = slice(end[i], end[i] + count)
            seen[i].logged.append(torch.cat([x[SLOTS[i], entries].flatten(1).float() for x in log[:of_entries]], 1))
            done[i] += count
            if dst[i] and lengths[i] and count == lengths[i]:
                seen[i].folds[done[i]] = state[dst[i]].clone()
            if certain[i]:
                src[i], start[i] = dst[i], 0
    return seen


def same_bytes(found: list[Tensor], wanted: list[Tensor], places: list[int]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x[places].view(torch.uint8), y[places].view(torch.uint8))


def assert_same(one: list[Seen], other: list[Seen]) -> None:
    for row, wanted in zip(one, other, strict=True):
        assert torch.equal(torch.cat(row.outputs), torch.cat(wanted.outputs))
        assert torch.equal(torch.cat(row.logged), torch.cat(wanted.logged))
        common = row.folds.keys() & wanted.folds.keys()
        assert common
        assert all(torch.equal(row.folds[count], wanted.folds[count]) for count in common)


@pytest.fixture(autouse=True)
def kernels_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(api, "backend", lambda x: reference if x.dtype == torch.float64 else gpu)


@pytest.mark.parametrize("name", ["conv1d", *full(*(name for name in CASES if name != "conv1d"))])
def test_outputs_and_folds_equal_the_recurrence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = import_module("mambacache.kernels.gpu.ssd.decode")
    monkeypatch.setattr(decode, "MAX_HEADS", 2)  # a group of three takes two programs
    case = CASES[name]()
    case.fill(torch.float32, torch.float32)
    one_by_one = run(case, 1, 0)
    for first, row, (outputs, states) in zip(FIRST, one_by_one, case.in_sequence(), strict=True):
        torch.testing.assert_close(torch.cat(row.outputs).double(), outputs, atol=2e-5, rtol=2e-5)
        assert row.folds.keys() > {count for count in range(1, TOKENS + 1) if (first + count) % 16 == 0}
        for count, state in row.folds.items():
            torch.testing.assert_close(state.double(), states[count], atol=2e-5, rtol=2e-5)
    assert_same(run(case, 5, 1), one_by_one)


@pytest.mark.parametrize("name", full(*(name for name in CASES if "uneven" not in name)))
def test_16_bits_are_the_same_however_tokens_are_cut(name: str) -> None:
    case = CASES[name]()
    case.fill(LOW, LOW)
    assert_same(run(case, 3, 2), run(case, 8, 3))


@pytest.mark.skipif(DEVICE == "cuda", reason="the order of a GPU's programs is its own")
@pytest.mark.parametrize(
    "name", ["conv1d", *full("gated delta rule", "kda", "selective scan", "ssd, plain and uneven")]
)
def test_programs_side_by_side_may_run_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs of a launch run at once, except that some wait for the first programs of their row."""
    from triton.runtime.interpreter import interpreter_builder

    for module in ("test_interpreter_log", "log_cases"):
        monkeypatch.setattr(import_module(module), "TOKENS", 16)
    monkeypatch.setattr(import_module("mambacache.kernels.gpu.ssd.decode"), "MAX_HEADS", 2)
    case = CASES[name]()
    case.fill(torch.float32, torch.float32)
    forwards = run(case, 5, 1)
    launch, set_place = Launcher.__call__, interpreter_builder.set_grid_idx

    def launch_backwards(self: Launcher, programs: int, *arguments: Any, **options: int) -> None:
        first, constants = 0, arguments[-1]
        if "arrivals" in self.kernel.arg_names:
            first = ROWS * constants.get("PREPARING", constants["HEADS"])
        backwards = [*reversed(range(first)), *reversed(range(first, programs))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: set_place(backwards[x], y, z))
            launch(self, programs, *arguments, **options)

    monkeypatch.setattr(Launcher, "__call__", launch_backwards)
    assert_same(run(case, 5, 1), forwards)


@pytest.mark.full
@pytest.mark.parametrize("op", ["delta rule", "state space"])
def test_a_program_takes_a_tile_or_all_tiles(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes all tiles where not all programs of fewer tiles can run at once."""
    for module in ("test_interpreter_log", "log_cases"):
        monkeypatch.setattr(import_module(module), "TOKENS", 16)
    if op == "delta rule":
        case = delta_rule(1, 2, 16, 64, channels=False)
    else:
        case = state_space(2, 1, 64, 16, plain=False, limit=(0.0, float("inf")))
    case.fill(torch.float32, torch.float32)
    log = import_module("mambacache.kernels.gpu.common.log")
    taken, tile_bits = [], log.tile_bits
    for module in ("common.delta_decode", "ssd.decode"):
        decode = import_module(f"mambacache.kernels.gpu.{module}")
        monkeypatch.setattr(decode, "tile_bits", lambda *args: taken.append(tile_bits(*args)) or taken[-1])
    one = run(case, 3, 1)
    monkeypatch.setattr(log, "REGISTERS", 0)
    assert_same(run(case, 3, 1), one)
    assert {*taken} == {0, 2}
