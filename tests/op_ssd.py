"""State-space duality (Mamba2) as the tests of ops see it: its oracle, its shapes, and inputs that are hard on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import inf
from typing import Any

import torch
from torch import Tensor

from kernel_cases import Inputs, Recurrence, inverse_softplus, random, sums_of_decays
from mambacache.kernels import StateTensor, ssd_log


class SsdOp(Recurrence):
    """`plain` is without gate, D and the bias of the step size."""

    name = "ssd"
    state_dtypes = (*Recurrence.state_dtypes, (torch.bfloat16, torch.float16))

    def __init__(
        self,
        groups: int = 2,
        heads: int = 4,
        width: int = 16,
        state_width: int = 32,
        plain: bool = False,
        dt_limit: tuple[float, float] = (0.0, inf),
    ) -> None:
        self.groups, self.dt_limit = groups, dt_limit
        self.state_shape = (heads, width, state_width)
        self.parameters = {
            "A": -random(heads, seed=3).exp(),
            "D": None if plain else random(heads, seed=4),
            "dt_bias": None if plain else random(heads, seed=5),
            "dt_limit": dt_limit,
        }
        if plain:
            self.parameters["z"] = None

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
        heads, width, state_width = self.state_shape
        shapes: dict[str, tuple[int, ...]] = {"x": (heads, width), "dt": (heads,)}
        shapes |= {name: (self.groups, state_width) for name in ("B", "C")}
        if "z" not in self.parameters:
            shapes["z"] = heads, width
        inputs = {name: random(tokens, *shape, seed=100 * seed + i) for i, (name, shape) in enumerate(shapes.items())}
        inputs["C"] /= state_width**0.5
        return {name: value.to(dtype) for name, value in inputs.items()}

    def _steps(self, inputs: Inputs) -> Tensor:
        bias = self.parameters["dt_bias"]
        dt = inputs["dt"].double() + (0 if bias is None else bias)
        return torch.nn.functional.softplus(dt, threshold=50).clamp(*self.dt_limit)

    def walk(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = {name: value.double() for name, value in inputs.items()}
        B, C = (x[name].repeat_interleave(len(S) // self.groups, dim=1) for name in ("B", "C"))
        A, D = (self.parameters[name] for name in ("A", "D"))
        outputs, states = torch.zeros_like(x["x"]), []
        for t, step in enumerate(self._steps(inputs)):
            S = (step * A).exp()[:, None, None] * S + torch.einsum("h,hp,hn->hpn", step, x["x"][t], B[t])
            outputs[t] = torch.einsum("hpn,hn->hp", S, C[t])
            states.append(S)
        if D is not None:
            outputs += D[:, None] * x["x"]
        return outputs * torch.nn.functional.silu(x["z"]) if "z" in x else outputs, states

    def log_layout(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        heads, width, state_width = self.state_shape
        return ssd_log(heads, self.groups, width, state_width, dtype, state_dtype)

    def entries(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, ...]:
        steps = self._steps(inputs)
        return inputs["x"].double(), inputs["B"].double(), steps, sums_of_decays(steps * self.parameters["A"])


class HardSsdOp(SsdOp):
    """A = -1, so that step sizes are log decays; `steps` makes them from uniform random numbers."""

    def __init__(self, steps: Callable[[Tensor], Tensor]) -> None:
        super().__init__(2, 4, 32, 64, plain=True)
        self.steps = steps
        self.parameters["A"] = -torch.ones(4, dtype=torch.float64)

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
        inputs = super().inputs(tokens, dtype, seed)
        generator = torch.Generator().manual_seed(seed)
        steps = self.steps(torch.rand(tokens, 4, dtype=torch.float64, generator=generator))
        inputs["dt"] = inverse_softplus(steps).to(dtype)
        return inputs


STRONGEST, WEAKEST = 1600.0, 1e-9  # log decays of a token

SHAPES = {
    f"{groups}-{heads}-{width}-{state_width}": partial(SsdOp, groups, heads, width, state_width)
    for (groups, heads), (width, state_width) in product(
        [(1, 1), (1, 6), (2, 4), (3, 3)], [(16, 16), (32, 256), (64, 128), (128, 256), (80, 48)]
    )
}


def every_decay(u: Tensor) -> Tensor:
    return STRONGEST * (WEAKEST / STRONGEST) ** u


def strong_and_weak_decay(u: Tensor) -> Tensor:
    return torch.where(u < 0.1, STRONGEST, 0.01)


def strong_decay(u: Tensor) -> Tensor:
    return torch.full_like(u, STRONGEST)


def weak_decay(u: Tensor) -> Tensor:
    return torch.full_like(u, WEAKEST)


HARD = {
    steps.__name__: partial(HardSsdOp, steps)
    for steps in (every_decay, strong_and_weak_decay, strong_decay, weak_decay)
}

REFUSED: list[tuple[dict[str, Callable[[Any], Any]], str]] = [
    ({"x": lambda x: x[:, :, :8]}, "P is 8, but head widths must be multiples of 16 up to 256"),
    ({"B": lambda B: B.repeat(1, 1, 9)}, "N is 288, but head widths"),
    ({"B": lambda B: B.repeat(1, 2, 1)[:, :3]}, "4 heads cannot share 3 groups of B and C: H must be a multiple of G"),
    ({"x": lambda x: x[:2]}, "x has 2 tokens"),
    ({"dt": lambda dt: dt[:, :2]}, "dt has shape"),
    ({"dt": Tensor.bfloat16}, "dt is bfloat16 where float32 is needed"),
    ({"C": lambda C: C[:, :1]}, r"C has shape \[3, 1, 32\] where the other arguments need \[3, 2, 32\]"),
    ({"z": lambda z: z[:, :2]}, "z has shape"),
    ({"A": lambda A: A[:2]}, "A has shape"),
    ({"D": lambda D: D[:2]}, "D has shape"),
    ({"dt_bias": lambda dt_bias: dt_bias[:2]}, "dt_bias has shape"),
    ({"dt_limit": lambda _: (0.1, 0.01)}, r"dt_limit is \(0.1, 0.01\), but it must be two bounds"),
    ({"dt_limit": lambda _: (-1.0, 0.01)}, r"dt_limit is \(-1.0, 0.01\), but"),
    ({"state": lambda state: state.mT}, "state has shape"),
    ({"state": Tensor.int}, "state is int32"),
]
