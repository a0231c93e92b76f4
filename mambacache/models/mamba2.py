"""Implement Mamba2 layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mambacache.kernels import StateTensor, conv1d, conv1d_log, gated_rms_norm, ssd, ssd_log
from mambacache.models.layer import current_context
from mambacache.models.projection import scale


class Mamba2(nn.Module):
    """Runs a Mamba2 layer over the state pool.

    A state is a conv window [W - 1, H * P + 2 * G * N] of raw x, B and C, and matrices [H, P, N]. Step sizes are
    clamped to `time_step_limit` in decode as in prefill.

    Args:
        in_proj: maps to [gate, x, B, C, step sizes].
        norm_options: options of `gated_rms_norm`; None to gate without a norm.
    """

    number: int

    def __init__(self, source: Any, in_proj: nn.Module, norm_options: dict[str, Any] | None) -> None:
        super().__init__()
        if source.activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act is {source.activation!r}: Mamba2 layers run with 'silu' only")
        self.heads, self.head_dim = source.num_heads, source.head_dim
        self.groups, self.state_dim = source.n_groups, source.ssm_state_size
        self.time_step_limit = source.time_step_limit
        self.in_proj, self.out_proj = in_proj, source.out_proj
        self.conv_weight = nn.Parameter(source.conv1d.weight.detach().squeeze(1), requires_grad=False)
        self.conv_bias = source.conv1d.bias
        self.A = nn.Parameter(-torch.exp(source.A_log.detach().float()), requires_grad=False)
        self.D, self.dt_bias = source.D, source.dt_bias
        self.norm_options = norm_options or {}
        self.norm_weight: nn.Parameter | None = None if norm_options is None else source.norm.weight

    def state_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        dim, width = self.conv_weight.shape
        return (
            StateTensor((width - 1, dim), self.conv_weight.dtype),
            StateTensor((self.heads, self.head_dim, self.state_dim), state_dtype),
        )

    def log_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        dtype = self.conv_weight.dtype
        return (
            conv1d_log(len(self.conv_weight), dtype),
            *ssd_log(self.heads, self.groups, self.head_dim, self.state_dim, dtype, state_dtype),
        )

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        context = current_context()
        (conv_state, recurrent_state), (conv_log, *token_log) = context.states[self.number], context.logs[self.number]
        inner, state = self.heads * self.head_dim, self.groups * self.state_dim
        gate, xBC, dt = self.in_proj(hidden_states[0]).split([inner, inner + 2 * state, self.heads], dim=-1)
        xBC = conv1d(xBC, self.conv_weight, self.conv_bias, conv_state, conv_log, context.indices, activation="silu")
        x, B, C = xBC.split([inner, state, state], dim=-1)
        y = ssd(
            x.unflatten(-1, (self.heads, self.head_dim)),
            dt,
            self.A,
            B.unflatten(-1, (self.groups, self.state_dim)),
            C.unflatten(-1, (self.groups, self.state_dim)),
            self.D,
            gate.unflatten(-1, (self.heads, self.head_dim)) if self.norm_weight is None else None,
            self.dt_bias,
            recurrent_state,
            token_log,
            context.indices,
            dt_limit=self.time_step_limit,
        ).flatten(-2)
        if self.norm_weight is not None:
            y = gated_rms_norm(y, gate, self.norm_weight, **self.norm_options)
        return self.out_proj(y)[None]


def from_mamba2(source: Any) -> Mamba2:
    """Build a layer that gates before its norm."""
    group_size = getattr(source.norm, "group_size", None)
    options = {"eps": source.norm.variance_epsilon, "norm_before_gate": False, "group_size": group_size}
    return Mamba2(source, source.in_proj, options)


def from_falcon_h1(source: Any) -> Mamba2:
    """Build a layer with multipliers, and an optional norm before or after the gate."""
    in_proj = scale(source.in_proj, source.ssm_in_multiplier, source.mup_vector.flatten())
    options = None
    if source.mamba_rms_norm:
        options = {
            "eps": source.norm.variance_epsilon,
            "norm_before_gate": source.norm.norm_before_gate,
            "group_size": source.intermediate_size // source.n_groups,
            "round_normed": False,
        }
    return Mamba2(source, in_proj, options)
