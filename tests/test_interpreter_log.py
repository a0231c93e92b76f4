"""Decode over a token log in the GPU's kernels, in Triton's interpreter where there is no GPU: it gives what each
token's recurrence gives, and the same bits however tokens are cut into steps and whatever drafts are rejected."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from mambacache.kernels import (
    StateIndices,
    StateTensor,
    api,
    conv1d,
    gated_delta_rule,
    gpu,
    kda,
    logs,
    reference,
    selective_scan,
    ssd,
)

ROWS, TOKENS, BLOCKS = 2, 28, 7
SOURCES, BLANK, CHECKPOINTS, SLOTS, FIRST = (3, 0), (1, 2), (5, 4), (1, 2), (5, 16)  # of each row; no state at first
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16
WIDTH = 64 if DEVICE == "cuda" else 16

Step = Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]]  # of one row: state, token -> output, state


@dataclass
class Case:
    """One op: what its tokens have, and what a token does to one row's state in float64."""

    shapes: list[tuple[int, ...]]
    state_shape: tuple[int, ...]
    run: Callable[..., Tensor]  # tokens, state, log, indices, out -> out
    step: Step
    log: Callable[[torch.dtype, torch.dtype], Sequence[StateTensor]]  # of activations and states
    width: tuple[int, ...]  # of an output
    state: Tensor = field(init=False)
    inputs: list[Tensor] = field(init=False)

    def fill(self, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = [torch.randn(ROWS, TOKENS, *shape, generator=generator) for shape in self.shapes]
        self.inputs = [x.to(DEVICE, dtype) for x in self.inputs]
        state = torch.full((BLOCKS, *self.state_shape), torch.nan)
        state[SOURCES[0]] = 0.3 * torch.randn(self.state_shape, generator=generator)
        self.state = state.to(DEVICE, state_dtype)

    def in_sequence(self) -> list[tuple[Tensor, list[Tensor]]]:
        """Of each row its outputs [TOKENS, ...] and its states after so many tokens, in float64."""
        found = []
        for row, block in enumerate(SOURCES):
            states = [self.state[block].double() if block else torch.zeros(self.state_shape, device=DEVICE).double()]
            outputs = []
            for t in range(TOKENS):
                y, state = self.step(states[-1], [x[row, t].double() for x in self.inputs])
                outputs.append(y)
                states.append(state)
            found.append((torch.stack(outputs), states))
        return found


def parameter(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def delta_rule(heads: int, value_heads: int, K: int, V: int, beta_scale: float = 1.0, *, channels: bool) -> Case:
    gate = (heads, K) if channels else (value_heads,)
    A_log, dt_bias = parameter(value_heads), parameter(*gate)

    def run(tokens: list[Tensor], state: Tensor, *rest: object, out: Tensor) -> Tensor:
        if channels:
            return kda(*tokens, A_log, dt_bias, state, *rest, out=out)
        return gated_delta_rule(*tokens, A_log, dt_bias, state, *rest, beta_scale, out=out)

    def step(S: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v, a, b = token
        q, k = (x / (x.square().sum(1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(value_heads // heads, 0) for x in (q, k))
        rate = A_log.double().exp().view(-1, *[1] * (len(gate) - 1))
        decay = (-rate * softplus(a + dt_bias.double(), threshold=100)).exp()
        S = S * (decay[:, None, :] if channels else decay[:, None, None])
        u = beta_scale * b.sigmoid()[:, None] * (v - (S * k[:, None, :]).sum(2))
        S = S + u[:, :, None] * k[:, None, :]
        return (S * q[:, None, :]).sum(2) / K**0.5, S

    def log(dtype: torch.dtype, state_dtype: torch.dtype) -> Sequence[StateTensor]:
        if channels:
            return logs.kda_log(heads, K, V, dtype, state_dtype)
        return logs.gated_delta_rule_log(heads, value_heads, K, V, dtype, state_dtype)

    shapes = [(heads, K), (heads, K), (value_heads, V), gate, (value_heads,)]
    return Case(shapes, (value_heads, V, K), run, step, log, (value_heads, V))


def state_space(heads: int, groups: int, P: int, N: int, *, plain: bool, limit: tuple[float, float]) -> Case:
    A, D, dt_bias = -parameter(heads).abs() - 0.1, parameter(heads), parameter(heads)

    def run(tokens: list[Tensor], state: Tensor, *rest: object, out: Tensor) -> Tensor:
        x, dt, B, C, *z = tokens
        more = (None, None, None) if plain else (D, *z, dt_bias)
        return ssd(x, dt, A, B, C, *more, state, *rest, limit, out=out)

    def step(S: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, dt, B, C, *z = token
        B, C = (part.repeat_interleave(heads // groups, 0) for part in (B, C))
        size = softplus(dt if plain else dt + dt_bias.double(), threshold=100).clamp(*limit)
        S = (size * A.double()).exp()[:, None, None] * S + (size[:, None] * x)[:, :, None] * B[:, None, :]
        y = (S * C[:, None, :]).sum(2)
        return (y if plain else (y + D.double()[:, None] * x) * silu(z[0])), S

    shapes = [(heads, P), (heads,), (groups, N), (groups, N)] + ([] if plain else [(heads, P)])
    return Case(shapes, (heads, P, N), run, step, partial(logs.ssd_log, heads, groups, P, N), (heads, P))


def scan(dim: int, N: int, *, plain: bool) -> Case:
    A, D, dt_bias = -parameter(dim, N).abs(), parameter(dim), parameter(dim)

    def run(tokens: list[Tensor], state: Tensor, *rest: object, out: Tensor) -> Tensor:
        x, dt, B, C, *z = tokens
        more = (None, None) if plain else (*z, dt_bias)
        return selective_scan(x, dt, A, B, C, D, *more, state, *rest, out=out)

    def step(S: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, dt, B, C, *z = token
        size = softplus(dt if plain else dt + dt_bias.double(), threshold=100)
        S = (size[:, None] * A.double()).exp() * S + (size * x)[:, None] * B
        y = S @ C + D.double() * x
        return (y if plain else y * silu(z[0])), S

    shapes = [(dim,), (dim,), (N,), (N,)] + ([] if plain else [(dim,)])
    return Case(shapes, (dim, N), run, step, partial(logs.selective_scan_log, dim, N), (dim,))


def convolution(dim: int, taps: int, *, gated: bool) -> Case:
    weight = parameter(dim, taps)

    def run(tokens: list[Tensor], state: Tensor, log: list[Tensor], indices: StateIndices, out: Tensor) -> Tensor:
        x, *gates = tokens
        return conv1d(x, weight, None, state, *log, indices, None if gated else "silu", *gates, out=out)

    def step(window: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, *gates = token
        inputs = torch.cat([window, (x * gates[0] if gated else x)[None]])
        y = (inputs * weight.double().T).sum(0)
        return (y * gates[1] if gated else silu(y)), inputs[1:]

    shapes = [(dim,)] * (3 if gated else 1)
    return Case(shapes, (taps - 1, dim), run, step, lambda dtype, _: [logs.conv1d_log(dim, dtype)], (dim,))


CASES = {
    "gated delta rule": partial(delta_rule, 1, 2, WIDTH, WIDTH, channels=False),
    "gated delta rule, uneven": partial(delta_rule, 1, 3, 80, 16, 2.0, channels=False),
    "kda": partial(delta_rule, 2, 2, WIDTH, WIDTH, channels=True),
    "kda, uneven": partial(delta_rule, 1, 1, 48, 80, channels=True),
    "ssd": partial(state_space, 2, 1, WIDTH, WIDTH, plain=False, limit=(0.0, float("inf"))),
    "ssd, plain and uneven": partial(state_space, 3, 1, 16, 48, plain=True, limit=(0.2, 1.5)),
    "selective scan": partial(scan, 20, 16, plain=False),
    "selective scan, plain": partial(scan, 24, 3, plain=True),
    "conv1d": partial(convolution, 40, 4, gated=False),
    "conv1d, gated": partial(convolution, 24, 2, gated=True),
}


@dataclass
class Seen:
    """Of one row: its outputs, what its log held of each token, and its states by the number of tokens in them."""

    outputs: list[Tensor] = field(default_factory=list)
    logged: list[Tensor] = field(default_factory=list)
    folds: dict[int, Tensor] = field(default_factory=dict)


def run(case: Case, tokens: int, seed: int) -> list[Seen]:
    """Steps of up to so many tokens a row, of which those behind the accepted ones were others.

    States are folded where a log is full, which begins it anew, and sometimes besides.
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
    of_entries = sum(each.shape[0] == 16 for each in layout)  # tensors; those behind them are a slot's own
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
        given = [torch.full((ROWS, tokens, *x.shape[2:]), torch.nan, dtype=dtype, device=DEVICE) for x in case.inputs]
        for batch, x in zip(given, case.inputs, strict=True):
            for i, count in enumerate(accepted):
                batch[i, : lengths[i]] = torch.randn(lengths[i], *x.shape[2:]).to(batch)
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
    """Bit by bit."""
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


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_outputs_and_folds_are_those_of_the_recurrence(
    make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = import_module("mambacache.kernels.gpu.ssd.decode")
    monkeypatch.setattr(decode, "MAX_HEADS", 2)  # a group of three takes two programs
    case = make()
    case.fill(torch.float32, torch.float32)
    one_by_one = run(case, 1, 0)
    for first, row, (outputs, states) in zip(FIRST, one_by_one, case.in_sequence(), strict=True):
        torch.testing.assert_close(torch.cat(row.outputs).double(), outputs, atol=2e-5, rtol=2e-5)
        assert row.folds.keys() > {count for count in range(1, TOKENS + 1) if (first + count) % 16 == 0}
        for count, state in row.folds.items():
            torch.testing.assert_close(state.double(), states[count], atol=2e-5, rtol=2e-5)
    assert_same(run(case, 5, 1), one_by_one)


@pytest.mark.parametrize("name", [name for name in CASES if "uneven" not in name])
def test_16_bits_are_the_same_however_tokens_are_cut(name: str) -> None:
    case = CASES[name]()
    case.fill(LOW, LOW)
    assert_same(run(case, 3, 2), run(case, 8, 3))
