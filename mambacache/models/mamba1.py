"""Implement Mamba layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mambacache.kernels import StateTensor, conv1d, conv1d_log, selective_scan, selective_scan_log
from mambacache.models.layer import current_context
from mambacache.models.projection import without_bias


class Mamba1(nn.Module):
    """Runs a Mamba layer over the state pool.

    A state is a conv window [W - 1, dim] and a matrix [dim, N]. Norms apply to outputs of `source.x_proj`.
    """

    number: int

    def __init__(self, source: Any, dt_norm: nn.Module, b_norm: nn.Module, c_norm: nn.Module) -> None:
        super().__init__()
        if source.activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act is {source.activation!r}: Mamba layers run with 'silu' only")
        self.in_proj, self.x_proj, self.out_proj = source.in_proj, source.x_proj, source.out_proj
        self.dt_proj, self.dt_bias = without_bias(source.dt_proj)
        self.dt_norm, self.b_norm, self.c_norm = dt_norm, b_norm, c_norm
        self.conv_weight = nn.Parameter(source.conv1d.weight.detach().squeeze(1), requires_grad=False)
        self.conv_bias = source.conv1d.bias
        self.A = nn.Parameter(-torch.exp(source.A_log.detach().float()), requires_grad=False)
        self.D = source.D
        self.dt_rank = source.time_step_rank

    def state_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        dim, width = self.conv_weight.shape
        return (
            StateTensor((width - 1, dim), self.conv_weight.dtype),
            StateTensor(tuple(self.A.shape), state_dtype),
        )

    def log_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        dtype = self.conv_weight.dtype
        return conv1d_log(len(self.conv_weight), dtype), *selective_scan_log(*self.A.shape, dtype, state_dtype)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        context = current_context()
        (conv_state, recurrent_state), (conv_log, *token_log) = context.states[self.number], context.logs[self.number]
        x, z = self.in_proj(hidden_states[0]).chunk(2, dim=-1)
        x = conv1d(x, self.conv_weight, self.conv_bias, conv_state, conv_log, context.indices, activation="silu")
        width = self.A.shape[1]
        dt, B, C = self.x_proj(x).split([self.dt_rank, width, width], dim=-1)
        y = selective_scan(
            x,
            self.dt_proj(self.dt_norm(dt)),
            self.A,
            self.b_norm(B),
            self.c_norm(C),
            self.D,
            z,
            self.dt_bias,
            recurrent_state,
            token_log,
            context.indices,
        )
        return self.out_proj(y)[None]


def from_mamba(source: Any) -> Mamba1:
    return Mamba1(source, nn.Identity(), nn.Identity(), nn.Identity())


def from_normed_mamba(source: Any) -> Mamba1:
    return Mamba1(source, source.dt_layernorm, source.b_layernorm, source.c_layernorm)
