"""Ops that decode over token logs, in shapes small enough for Triton's interpreter, and a token's work in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from mambacache.kernels import StateIndices, StateTensor, conv1d, gated_delta_rule, kda, logs, selective_scan, ssd
from selection import full

ROWS, TOKENS, BLOCKS = 2, 28, 7
SOURCES = (3, 0)  # of each row; no state at first
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 64 if DEVICE == "cuda" else 16
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cannot round to bf16

Step = Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]]  # of one row: state, token -> output, state


@dataclass
class Case:
    """Describe an op by the shapes of its tokens and by the effect of a token on a row's state in float64."""

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
        """Return each row's outputs [TOKENS, ...] and its states after 0 to TOKENS tokens, in float64."""
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
NAMES = [each for name in CASES for each in (full(name) if "," in name else [name])]
