"""The gated delta rule as the tests of the ops see it: its oracle, its shapes, and inputs that are hard on it.

KDA has most of this in common: see `op_kda`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from kernel_cases import Inputs, Recurrence, Row, inverse_softplus, plan_arrays, random, sums_of_decays
from mambacache import kernels
from mambacache.kernels import StateIndices, StateTensor, gated_delta_rule_log


class DeltaRuleOp(Recurrence):
    name = "gated_delta_rule"
    gate = "a"  # the input that decays come from
    spoil: Callable[[Inputs, str], None] | None = None  # makes inputs hard, by the name of their gate

    def __init__(
        self,
        key_heads: int = 2,
        value_heads: int = 4,
        key_width: int = 32,
        value_width: int = 16,
        beta_scale: float = 1.0,
    ) -> None:
        self.key_heads, self.value_heads, self.beta_scale = key_heads, value_heads, beta_scale
        self.state_shape = (value_heads, value_width, key_width)
        self.parameters = {
            "A_log": random(value_heads, seed=3),
            "dt_bias": random(value_heads, seed=4),
            "beta_scale": beta_scale,
        }

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
        heads, value_width, key_width = self.state_shape
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.key_heads, key_width),
            "k": (self.key_heads, key_width),
            "v": (heads, value_width),
        }
        shapes |= {self.gate: self.parameters["dt_bias"].shape, "b": (heads,)}
        inputs = {
            name: random(tokens, *shape, seed=100 * seed + i, dtype=dtype)
            for i, (name, shape) in enumerate(shapes.items())
        }
        if self.spoil:
            self.spoil(inputs, self.gate)
        return inputs

    def _terms(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In float64 normalised queries and keys, values, log decays [tokens, HV, K or 1], and beta."""
        x = {name: value.double() for name, value in inputs.items()}
        group = self.value_heads // self.key_heads
        q, k = ((x[n] * inverse_norm(x[n])[..., None]).repeat_interleave(group, 1) for n in ("q", "k"))
        step = torch.nn.functional.softplus(x[self.gate] + self.parameters["dt_bias"], threshold=50)
        step = step if step.dim() == 3 else step[..., None]
        g = -self.parameters["A_log"].exp()[:, None] * step
        return q, k, x["v"], g, x["b"].sigmoid() * self.beta_scale

    def steps(self, inputs: Inputs, S: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the output and the state after every token, in float64."""
        q, k, v, g, beta = self._terms(inputs)
        for t in range(len(q)):
            S = S * g[t, :, None].exp()
            u = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", S, k[t]))
            S = S + u[:, :, None] * k[t, :, None, :]
            yield torch.einsum("hvk,hk->hv", S, q[t]) / q.shape[-1] ** 0.5, S

    def walk(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, list[Tensor]]:
        steps = list(self.steps(inputs, S))
        outputs = torch.stack([output for output, _ in steps]) if steps else inputs["v"].double()
        return outputs, [state for _, state in steps]

    def log_layout(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        _, value_width, key_width = self.state_shape
        return gated_delta_rule_log(self.key_heads, self.value_heads, key_width, value_width, dtype, state_dtype)

    def entries(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta = self._terms(inputs)
        before = torch.stack([S, *self.walk(inputs, S)[1][:-1]])[: len(q)]
        u = beta[..., None] * (v - torch.einsum("thvk,thk->thv", before, g.exp() * k))
        raw, sums = inputs["k"].double(), sums_of_decays(g)
        return raw, inverse_norm(raw), u, sums[..., 0] if sums.shape[-1] == 1 else sums


class TokenRows:
    """Compare the outputs of prefill rows token by token. The rows have equal lengths and separate states."""

    def __init__(
        self, op: DeltaRuleOp, rows: int, inputs: Inputs, scales: tuple[float, ...], device: str, strided: bool = False
    ) -> None:
        """Take inputs [rows * length, ...]. The states of rows have these scales in turn."""
        self.op, self.rows, self.device = op, rows, device
        self.length = len(inputs["q"]) // rows
        if strided:
            widths = [x[0].numel() for x in inputs.values()]
            wide = torch.cat([x.flatten(1) for x in inputs.values()], dim=1)
            parts = zip(inputs.items(), wide.split(widths, dim=1), strict=True)
            inputs = {name: part.unflatten(1, x.shape[1:]) for (name, x), part in parts}
        self.inputs = {name: x.to(device) for name, x in inputs.items()}
        sizes = torch.tensor(scales).repeat(rows)[:rows, None, None, None]
        self.states = (sizes * random(rows, *op.state_shape, seed=7, dtype=torch.float32)).to(device)
        self.exact = self._exact()

    def _exact(self) -> Tensor:
        """Return the outputs [tokens, heads, V] of the recurrence in float64, all rows at once as heads of one."""
        heads = self.op.state_shape[0]
        every = copy(self.op)
        every.key_heads, every.value_heads = (count * self.rows for count in (self.op.key_heads, heads))
        every.parameters = {
            name: x.to(self.device).repeat(self.rows, *[1] * (x.dim() - 1)) if isinstance(x, Tensor) else x
            for name, x in self.op.parameters.items()
        }
        inputs = {
            name: x.unflatten(0, (self.rows, self.length)).transpose(0, 1).flatten(1, 2)
            for name, x in self.inputs.items()
        }
        outputs = torch.stack([output for output, _ in every.steps(inputs, self.states.double().flatten(0, 1))])
        return outputs.unflatten(1, (self.rows, heads)).transpose(0, 1).flatten(0, 1)

    def errors(self, library: ModuleType = kernels, **options: torch.dtype) -> Tensor:
        """Return the RMS error of each token and head [tokens, heads], relative to the RMS of the exact outputs."""
        dst = range(1 + self.rows, 1 + 2 * self.rows)
        plan = [Row(self.length, src=1 + i, dst=block) for i, block in enumerate(dst)]
        indices = StateIndices.from_arrays(plan_arrays([], plan), self.device)
        pool = torch.full((1 + 2 * self.rows, *self.op.state_shape), torch.nan, device=self.device)
        pool[1 : 1 + self.rows] = self.states
        error = self.op.run(self.inputs, pool, (), indices, library, **options).double() - self.exact
        return (error.square().mean(-1) / self.exact.square().mean(-1)).sqrt()


def inverse_norm(x: Tensor) -> Tensor:
    return (x.square().sum(-1) + 1e-6).rsqrt()


def harden(make: Callable[[], DeltaRuleOp], spoil: Callable[[Inputs, str], None]) -> DeltaRuleOp:
    """An op with decays that are given by its gate alone, a beta near its maximum, and one more difficulty."""

    def spoil_all(inputs: Inputs, gate: str) -> None:
        inputs["b"] = inputs["b"].abs() + 3
        spoil(inputs, gate)

    op = make()
    op.spoil = spoil_all
    for name in ("A_log", "dt_bias"):
        op.parameters[name] = torch.zeros_like(op.parameters[name])
    return op


def reflecting(gate: float, spread: float, width: int = 128) -> DeltaRuleOp:
    """Return an op with tokens that almost reflect the state, by beta = 2 sigmoid(8), in almost the same direction.

    Any two keys have a cosine of about 1 / (1 + spread^2); `gate` gives the log decay -softplus(gate).
    """

    def spoil(inputs: Inputs, name: str) -> None:
        directions = torch.nn.functional.normalize(inputs["k"].double(), dim=-1)
        inputs["k"] = (directions[:1] + spread * directions).to(inputs["k"])
        inputs["b"] = torch.full_like(inputs["b"], 8.0)
        inputs[name] = torch.full_like(inputs[name], gate)

    op = DeltaRuleOp(1, 1, width, width, beta_scale=2.0)
    op.spoil = spoil
    for name in ("A_log", "dt_bias"):
        op.parameters[name] = torch.zeros_like(op.parameters[name])
    return op


def strong_decay(inputs: Inputs, gate: str) -> None:
    """Log decays from -50 to almost 0, side by side."""
    inputs[gate] = torch.where(random(*inputs[gate].shape, seed=1) > 0, 50.0, -5.0).to(inputs[gate])


def extreme_decay(inputs: Inputs, gate: str) -> None:
    """Log decays of -2000 beside almost 0: differences of their sums would keep two digits."""
    inputs[gate] = torch.where(random(*inputs[gate].shape, seed=1) > 0, 2000.0, -5.0).to(inputs[gate])


def mixed_decay(inputs: Inputs, gate: str) -> None:
    """Log decays from -1600 to -0.001, all magnitudes alike, side by side."""
    u = torch.rand(inputs[gate].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    inputs[gate] = inverse_softplus(1600 * (0.001 / 1600) ** u).to(inputs[gate])


def steady_strong_decay(inputs: Inputs, gate: str) -> None:
    inputs[gate] = torch.full_like(inputs[gate], 50.0)


def zero_keys(inputs: Inputs, gate: str) -> None:
    inputs["k"][::3] = 0


def repeated_keys(inputs: Inputs, gate: str) -> None:
    inputs["k"] = inputs["k"][:1].expand_as(inputs["k"]).clone()


def correlated_keys(inputs: Inputs, gate: str) -> None:
    """Any two keys have a cosine of about 0.9, as keys after SiLU may."""
    directions = torch.nn.functional.normalize(inputs["k"], dim=-1)
    inputs["k"] = directions[:1] + directions / 3


def no_decay(inputs: Inputs, gate: str) -> None:
    inputs[gate] = torch.full_like(inputs[gate], -30.0)


SHAPES = {
    f"{key_heads}-{value_heads}-{key_width}-{value_width}": partial(
        DeltaRuleOp, key_heads, value_heads, key_width, value_width
    )
    for (key_heads, value_heads), (key_width, value_width) in product(
        [(1, 1), (2, 4), (1, 4), (3, 3)], [(16, 16), (96, 192), (128, 128), (48, 256), (256, 80)]
    )
}

SPOILS = (
    strong_decay,
    extreme_decay,
    mixed_decay,
    steady_strong_decay,
    zero_keys,
    repeated_keys,
    correlated_keys,
    no_decay,
)

HARD = {
    f"{spoil.__name__}-{beta_scale}": partial(harden, partial(DeltaRuleOp, 2, 4, 64, 32, beta_scale=beta_scale), spoil)
    for spoil in SPOILS
    for beta_scale in (1.0, 2.0)
}

REFUSED: list[tuple[dict[str, Callable[[Tensor], Tensor]], str]] = [
    ({"q": lambda q: q[..., :24], "k": lambda k: k[..., :24]}, "K is 24, but head widths must be multiples of 16"),
    ({"v": lambda v: v.repeat(1, 1, 17)}, "V is 272, but head widths"),
    ({"v": lambda v: v[:, :3]}, "3 value heads cannot share 2 key heads"),
    ({"k": lambda k: k[:, :1]}, r"k has shape \[3, 1, 32\] where the other arguments need \[3, 2, 32\]"),
    ({"v": Tensor.bfloat16}, "v is bfloat16 where float32 is needed"),
    ({"a": lambda a: a[:, :2]}, "a has shape"),
    ({"b": lambda b: b[:2]}, "b has shape"),
    ({"A_log": lambda A_log: A_log[:2]}, "A_log has shape"),
    ({"dt_bias": lambda dt_bias: dt_bias[:2]}, "dt_bias has shape"),
    ({"state": lambda state: state.mT}, "state has shape"),
    ({"state": Tensor.int}, "state is int32"),
]
"""Arguments of the op as it is by default, changed, and what is said of them."""
