"""Implement LFM2's short convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mambacache.kernels import StateTensor, conv1d, conv1d_log
from mambacache.models.layer import current_context


class ShortConv(nn.Module):
    """Runs a gated short convolution, C * conv(B * x); a state is a window [W - 1, hidden] of B * x."""

    number: int

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = source.in_proj, source.out_proj
        self.conv_weight = nn.Parameter(source.conv.weight.detach().squeeze(1), requires_grad=False)
        self.conv_bias = source.conv.bias

    def state_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        dim, width = self.conv_weight.shape
        return (StateTensor((width - 1, dim), self.conv_weight.dtype),)

    def log_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (conv1d_log(len(self.conv_weight), self.conv_weight.dtype),)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        context = current_context()
        (conv_state,), (conv_log,) = context.states[self.number], context.logs[self.number]
        b, c, x = self.in_proj(hidden_states[0]).chunk(3, dim=-1)
        weight, bias = self.conv_weight, self.conv_bias
        y = conv1d(x, weight, bias, conv_state, conv_log, context.indices, activation=None, input_gate=b, output_gate=c)
        return self.out_proj(y)[None]
