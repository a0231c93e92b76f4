"""The selective scan as the tests of the ops see it: its oracle, its shapes, and inputs that are hard on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernel_cases import Inputs, Recurrence, random
from mambacache.kernels import StateTensor, selective_scan_log


class SelectiveScanOp(Recurrence):
    """Step sizes around 0.3, and decays from 0.03 to 0.9 a token."""

    name = "selective_scan"
    state_dtypes = (*Recurrence.state_dtypes, (torch.bfloat16, torch.float16))
    carries_state = True

    def __init__(self, dim: int = 37, width: int = 16, plain: bool = False) -> None:
        self.dim, self.width, self.plain = dim, width, plain
        self.state_shape = (dim, width)
        self.parameters = {
            "A": -torch.linspace(0.3, 8, width, dtype=torch.float64).expand(dim, width) * random(dim, 1, seed=3).exp(),
            "D": random(dim, seed=4),
            "dt_bias": None if plain else random(dim, seed=5) - 1,
        }
        if plain:
            self.parameters["z"] = None

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
        widths = {"x": self.dim, "dt": self.dim, "B": self.width, "C": self.width}
        widths |= {} if self.plain else {"z": self.dim}
        return {
            name: random(tokens, channels, seed=100 * seed + i, dtype=dtype)
            for i, (name, channels) in enumerate(widths.items())
        }

    def walk(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = {name: value.double() for name, value in inputs.items()}
        dt = torch.nn.functional.softplus(x["dt"] + (0 if self.plain else self.parameters["dt_bias"]), threshold=50)
        outputs, states = torch.zeros_like(x["x"]), []
        for t in range(len(dt)):
            S = torch.exp(dt[t, :, None] * self.parameters["A"]) * S + torch.outer(dt[t] * x["x"][t], x["B"][t])
            outputs[t] = S @ x["C"][t] + self.parameters["D"] * x["x"][t]
            states.append(S)
        return outputs if self.plain else outputs * torch.nn.functional.silu(x["z"]), states

    def log_layout(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return selective_scan_log(self.dim, self.width, dtype, state_dtype)

    def entries(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, ...]:
        return tuple(inputs[name].double() for name in ("x", "dt", "B"))


class HardSelectiveScanOp(SelectiveScanOp):
    """Step sizes from `shortest` to `longest` side by side, and A from -`slowest` to -`fastest` in every channel."""

    def __init__(self, shortest: float, longest: float, slowest: float, fastest: float) -> None:
        super().__init__(24, 16)
        self.shortest, self.longest = shortest, longest
        self.parameters["A"] = -torch.logspace(*_exponents(slowest, fastest), self.width, dtype=torch.float64).expand(
            self.dim, self.width
        )
        self.parameters["dt_bias"] = torch.zeros(self.dim, dtype=torch.float64)

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
        inputs = super().inputs(tokens, dtype, seed)
        steps = torch.logspace(*_exponents(self.shortest, self.longest), tokens * self.dim, dtype=torch.float64)
        order = torch.randperm(len(steps), generator=torch.Generator().manual_seed(seed))
        inputs["dt"] = torch.log(torch.expm1(steps))[order].view(tokens, self.dim).to(dtype)
        return inputs


def _exponents(*values: float) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).log10().tolist()


SHAPES = {
    f"{dim}-{width}": partial(SelectiveScanOp, dim, width)
    for dim, width in ((1, 16), (37, 16), (40, 1), (24, 3), (65, 64), (24, 32), (1024, 16))
}

HARD = {
    "every_step": partial(HardSelectiveScanOp, 1e-6, 100, 1e-3, 16),
    "short_steps": partial(HardSelectiveScanOp, 1e-6, 1e-6, 1, 16),
    "long_steps": partial(HardSelectiveScanOp, 100, 100, 1, 16),
    "no_decay": partial(HardSelectiveScanOp, 1e-3, 1, 1e-6, 1e-6),
}

REFUSED: list[tuple[dict[str, Callable[[Tensor], Tensor]], str]] = [
    ({"x": lambda x: x[:, :5]}, r"dt has shape \[3, 37\] where the other arguments need \[3, 5\]"),
    ({"x": lambda x: x[:2]}, "x has 2 tokens"),
    ({"dt": Tensor.bfloat16}, "dt is bfloat16 where float32 is needed"),
    ({"A": lambda A: A[0]}, r"A has shape \[16\], but it must be \[dim, N\]"),
    ({"A": lambda A: A[:5]}, r"A has shape \[5, 16\]"),
    ({"A": lambda A: A.repeat(1, 5)}, "A has 80 states per channel, but 1 to 64 are supported"),
    ({"A": lambda A: A.mT.contiguous().mT}, r"A has strides \[1, 37\], but it must be contiguous"),
    ({"B": lambda B: B[:, :8]}, "B has shape"),
    ({"C": lambda C: C[:2]}, "C has shape"),
    ({"D": lambda D: D[:5]}, "D has shape"),
    ({"z": lambda z: z[:, :5]}, "z has shape"),
    ({"dt_bias": lambda dt_bias: dt_bias[:5]}, "dt_bias has shape"),
    ({"state": lambda state: state.mT}, "state has shape"),
    ({"state": Tensor.int}, "state is int32"),
]
