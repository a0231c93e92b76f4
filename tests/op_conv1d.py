"""The causal convolution as the tests of the ops see it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernel_cases import MAX_DRAFTS, DtypePairs, Inputs, Row, random
from mambacache import kernels
from mambacache.kernels import StateIndices


class Conv1dOp:
    name = "conv1d"
    state_dtypes: DtypePairs = tuple((t, t) for t in (torch.float32, torch.bfloat16, torch.float16, torch.float64))
    exact_state = True

    def __init__(
        self, dim: int = 37, width: int = 4, bias: bool = True, activation: str | None = "silu", gated: bool = False
    ) -> None:
        self.dim, self.reach, self.activation = dim, width - 1, activation
        self.names = ("x", "input_gate", "output_gate") if gated else ("x",)
        self.weight = random(dim, width, seed=1)
        self.bias = random(dim, seed=2) if bias else None
        self.state_shape: tuple[int, ...] = (self.reach + MAX_DRAFTS, dim)

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
        return {name: random(tokens, self.dim, seed=seed + 10 + i, dtype=dtype) for i, name in enumerate(self.names)}

    def run(
        self, inputs: Inputs, state: Tensor, indices: StateIndices, library: ModuleType = kernels, **options: Any
    ) -> Tensor:
        bias = None if self.bias is None else self.bias.to(state.device)
        options |= {"weight": self.weight.to(state.device), "bias": bias, "activation": self.activation}
        return library.conv1d(**inputs, state=state, indices=indices, **options)

    def walk(self, row: Row, inputs: Inputs, before: Tensor, after: Tensor, decode: bool) -> Tensor:
        window = before[row.window_src, row.conv_offset :][: self.reach] if row.window_src else None
        zeros = torch.zeros(self.reach, self.dim, dtype=torch.float64)
        x = inputs["x"] * inputs.get("input_gate", 1)  # rounded as the window holds it
        history = torch.cat([zeros if window is None else window, x.double()])
        sums = [(self.weight.T * history[t : t + self.reach + 1]).sum(0) for t in range(row.length)]
        y = torch.stack(sums) + (0 if self.bias is None else self.bias) if sums else zeros[:0]

        def store(block: int, rows: Tensor) -> None:
            after[block] = 0
            after[block, : len(rows)] = rows

        if not decode:
            for count, block in row.stored.items():
                store(block, history[count : count + self.reach])
        else:
            if row.dst[0]:
                store(row.dst[0], history[1:])
            if row.boundary_index > 0 and row.dst[row.boundary_index]:
                store(row.dst[row.boundary_index], history[row.boundary_index + 1 :][: self.reach])
        y = y * torch.sigmoid(y) if self.activation else y
        return y * inputs.get("output_gate", 1)

    def final_state(self, state: Tensor, block: int, window_block: int, window_offset: int) -> Tensor:
        return state[window_block, window_offset : window_offset + self.reach]
