"""The causal convolution as the tests of the ops see it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernel_cases import DtypePairs, Inputs, random
from mambacache import kernels
from mambacache.kernels import StateIndices, StateTensor, conv1d_log


class Conv1dOp:
    name = "conv1d"
    state_dtypes: DtypePairs = tuple((t, t) for t in (torch.float32, torch.bfloat16, torch.float16, torch.float64))
    exact_state = True
    carries_state = False

    def __init__(
        self, dim: int = 37, width: int = 4, bias: bool = True, activation: str | None = "silu", gated: bool = False
    ) -> None:
        self.dim, self.reach, self.activation = dim, width - 1, activation
        self.names = ("x", "input_gate", "output_gate") if gated else ("x",)
        self.weight = random(dim, width, seed=1)
        self.bias = random(dim, seed=2) if bias else None
        self.state_shape: tuple[int, ...] = (self.reach, dim)

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
        return {name: random(tokens, self.dim, seed=seed + 10 + i, dtype=dtype) for i, name in enumerate(self.names)}

    def run(
        self,
        inputs: Inputs,
        state: Tensor,
        log: Sequence[Tensor],
        indices: StateIndices,
        library: ModuleType = kernels,
        **options: Any,
    ) -> Tensor:
        bias = None if self.bias is None else self.bias.to(state.device)
        options |= {"weight": self.weight.to(state.device), "bias": bias, "activation": self.activation}
        return library.conv1d(**inputs, state=state, log=log[0] if log else None, indices=indices, **options)

    def log_layout(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (conv1d_log(self.dim, dtype),)

    def entries(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, ...]:
        return ((inputs["x"] * inputs.get("input_gate", 1)).double(),)  # rounded as windows hold it

    def walk(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, list[Tensor]]:
        history = torch.cat([S, *self.entries(inputs, S)])
        tokens = range(len(inputs["x"]))
        y = torch.zeros(len(tokens), self.dim, dtype=torch.float64)
        for t in tokens:
            y[t] = (self.weight.T * history[t : t + self.reach + 1]).sum(0)
        y += 0 if self.bias is None else self.bias
        y = y * torch.sigmoid(y) if self.activation else y
        return y * inputs.get("output_gate", 1), [history[t + 1 :][: self.reach] for t in tokens]
