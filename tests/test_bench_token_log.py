"""Decode over a token log, as the benchmark times it: it gives what decode gives without one, however the tokens
are cut into steps and whatever drafts are rejected."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mambacache.kernels import StateIndices
from mambacache.kernels.reference.gated_delta_rule import gated_delta_rule
from mambacache.kernels.reference.kda import kda
from mambacache.kernels.reference.ssd import ssd

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "token_log"
ROWS, TOKENS, BLOCKS = 2, 28, 6
SRC, TARGETS, SLOTS, FIRST = (3, 1), (5, 2), (1, 2), (5, 16)  # of each row its blocks, slot, and first position
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# With one channel a thread Triton fuses its own product into the first sum with another's, which rounds otherwise in
# each of both: what a log holds is that of one.
WIDTH = 64 if DEVICE == "cuda" else 16
FAMILIES = ("gated delta rule", "kda", "ssd")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@dataclass
class Recurrence:
    """Inputs [ROWS, TOKENS, ...] of one family, in the order of the op's arguments; None stands for a parameter."""

    family: str
    inputs: list[Tensor | None]
    parameters: list[Tensor]
    state: Tensor  # [BLOCKS, ...]

    def arguments(self, chosen: list[Tensor | None]) -> list[Tensor]:
        left = iter(self.parameters)
        return [next(left) if each is None else each for each in chosen]


def recurrence(family: str, state_dtype: torch.dtype) -> Recurrence:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    if family == "ssd":
        heads, groups, P, N = 2, 1, WIDTH, WIDTH
        x, dt, B, C = (randn(ROWS, TOKENS, *shape) for shape in ((heads, P), (heads,), (groups, N), (groups, N)))
        parameters = [-randn(heads).abs(), randn(heads), randn(heads)]
        return Recurrence(family, [x, dt, None, B, C, None, None], parameters, pool((heads, P, N), state_dtype, randn))
    heads, value_heads, K, V = 1, 2 if family == "gated delta rule" else 1, WIDTH, WIDTH
    q, k, v = (randn(ROWS, TOKENS, *shape) for shape in ((heads, K), (heads, K), (value_heads, V)))
    gate = (value_heads,) if family == "gated delta rule" else (value_heads, K)
    parameters = [randn(value_heads), randn(*gate).flatten()]
    inputs = [q, k, v, randn(ROWS, TOKENS, *gate), randn(ROWS, TOKENS, value_heads), None, None]
    return Recurrence(family, inputs, parameters, pool((value_heads, V, K), state_dtype, randn))


def pool(shape: tuple[int, ...], dtype: torch.dtype, randn: Any) -> Tensor:
    state = torch.full((BLOCKS, *shape), torch.nan, device=DEVICE)
    state[list(SRC)] = 0.3 * randn(ROWS, *shape)
    return state.to(dtype)


def without_log(case: Recurrence) -> tuple[Tensor, list[Tensor]]:
    """Outputs [ROWS, TOKENS, ...] in float64, and the states after so many tokens [ROWS, ...]."""
    state = case.state.double()
    blocks = np.array(SRC, np.int32)
    zeros = np.zeros(ROWS, np.int32)
    arrays = {"decode_src": blocks, "decode_dst": blocks[:, None], "decode_len": zeros + 1, "decode_conv_src": blocks}
    arrays |= {"decode_conv_offset": zeros, "decode_boundary_index": zeros - 1}
    indices = StateIndices.from_arrays(arrays, DEVICE)
    outputs, states = [], [state[list(SRC)]]
    for t in range(TOKENS):
        given = case.arguments([None if each is None else each[:, t].double() for each in case.inputs])
        if case.family == "ssd":
            *given, bias = given
            outputs.append(ssd(*given, None, bias, state, indices))
        else:
            op = gated_delta_rule if case.family == "gated delta rule" else kda
            outputs.append(op(*given, state, indices))
        states.append(state[list(SRC)])
    return torch.stack(outputs, 1), states


def run(case: Recurrence, tokens: int, seed: int) -> tuple[list[Tensor], list[dict[int, Tensor]]]:
    """Each row's outputs, and its states by the number of tokens in them, as they were folded.

    Steps have up to so many tokens of a row, of which those behind the accepted ones were others.
    """
    import log_delta
    import log_ssd
    import log_window

    rng = random.Random(seed)
    flat = [None if each is None else each.flatten(0, 1) for each in case.inputs]
    module, shapes = (log_ssd, (flat[0], flat[3])) if case.family == "ssd" else (log_delta, (flat[1], flat[2]))
    entry = log_ssd.log_entry(*shapes) if case.family == "ssd" else log_delta.log_entry(*shapes, case.family == "kda")
    log = log_window.log_tensors(len(SLOTS) + 1, entry, DEVICE)
    scratch = module.scratch_of(*(each[: ROWS * tokens] for each in shapes))
    wide = flat[0] if case.family == "ssd" else flat[2]
    state = case.state.clone()
    outputs: list[list[Tensor]] = [[] for _ in SRC]
    folds: list[dict[int, Tensor]] = [{} for _ in SRC]
    done, window = [0] * ROWS, [first % log_window.FOLD for first in FIRST]
    while min(done) < TOKENS:
        at = [(first + count) % log_window.FOLD for first, count in zip(FIRST, done, strict=True)]
        lengths = [min(rng.randint(0, tokens), TOKENS - done[i], log_window.FOLD - at[i]) for i in range(ROWS)]
        accepted = [rng.randint(1, length) if length else 0 for length in lengths]
        rows = log_window.row_arrays(
            [log_window.Row(SRC[i], SLOTS[i], window[i], at[i], lengths[i], TARGETS[i]) for i in range(ROWS)], DEVICE
        )
        given = []
        for each in case.inputs:
            if each is not None:
                batch = torch.randn(ROWS, tokens, *each.shape[2:], device=DEVICE)
                for row, count in enumerate(accepted):
                    batch[row, :count] = each[row, done[row] : done[row] + count]
                each = batch.flatten(0, 1)
            given.append(each)
        out = torch.full((ROWS * tokens, *wide.shape[1:]), torch.nan, device=DEVICE)
        before = state.clone()
        module.decode(*case.arguments(given), state, log, rows, out, scratch, 1)
        assert torch.equal(state.view(torch.uint8), before.view(torch.uint8))
        module.fold(*shapes, state, log, rows)
        full = [e + length == log_window.FOLD for e, length in zip(at, lengths, strict=True)]
        others = [block for block in range(BLOCKS) if block not in [TARGETS[i] for i in range(ROWS) if full[i]]]
        assert torch.equal(state[others].view(torch.uint8), before[others].view(torch.uint8))
        for i, (result, count) in enumerate(zip(out.unflatten(0, (ROWS, tokens)), accepted, strict=True)):
            assert not result[lengths[i] :].any()
            outputs[i].append(result[:count])
            done[i] += count
            if full[i] and count == lengths[i]:
                folds[i][done[i]] = state[TARGETS[i]].clone()
                state[SRC[i]] = state[TARGETS[i]]
                window[i] = 0
    return [torch.cat(each) for each in outputs], folds


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_folds_are_those_without_a_log(family: str) -> None:
    case = recurrence(family, torch.float32)
    wanted, states = without_log(case)
    one_by_one, folds = run(case, 1, 0)
    for row in range(ROWS):
        torch.testing.assert_close(one_by_one[row].double(), wanted[row], atol=1e-5, rtol=1e-5)
        assert sorted(folds[row]) == [n for n in range(1, TOKENS + 1) if (FIRST[row] + n) % 16 == 0]
        for count, state in folds[row].items():
            torch.testing.assert_close(state.double(), states[count][row], atol=1e-5, rtol=1e-5)
    assert_same(run(case, 5, 1), (one_by_one, folds))


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_16_bits_are_rounded_at_folds_alone(family: str) -> None:
    case = recurrence(family, torch.float16)
    assert_same(run(case, 3, 2), run(case, 8, 3))


def assert_same(
    one: tuple[list[Tensor], list[dict[int, Tensor]]], other: tuple[list[Tensor], list[dict[int, Tensor]]]
) -> None:
    """Bit by bit."""
    for row in range(ROWS):
        assert torch.equal(one[0][row], other[0][row])
        assert one[1][row].keys() == other[1][row].keys() != set()
        assert all(torch.equal(state, other[1][row][count]) for count, state in one[1][row].items())
