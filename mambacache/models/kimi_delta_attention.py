"""Implement Kimi Delta Attention layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mambacache.kernels import StateTensor, conv1d, conv1d_log, gated_rms_norm, kda, kda_log
from mambacache.models.layer import current_context
from mambacache.models.projection import fuse


class KimiDeltaAttention(nn.Module):
    """Runs a KDA layer over the state pool.

    A state is a conv window [W - 1, 3 * H * D] of raw queries, keys and values, and matrices [H, D, D].
    """

    number: int

    def __init__(self, source: Any) -> None:
        super().__init__()
        if source.activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act is {source.activation!r}: Kimi Delta Attention layers run with 'silu' only")
        self.heads, self.head_dim = source.num_heads, source.head_dim
        decay = source.forget_gate
        self.in_proj = fuse(
            [source.q_proj, source.k_proj, source.v_proj, decay.f_a_proj, source.g_a_proj, source.b_proj]
        )
        self.decay_proj, self.gate_proj, self.out_proj = decay.f_b_proj, source.g_b_proj, source.o_proj
        self.conv_weight = nn.Parameter(source.conv1d.weight.detach().squeeze(1), requires_grad=False)
        self.A_log = nn.Parameter(decay.A_log.detach().flatten(), requires_grad=False)
        self.dt_bias = decay.dt_bias
        self.norm_weight, self.norm_eps = source.o_norm.weight, source.o_norm.variance_epsilon

    def state_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        dim, width = self.conv_weight.shape
        return (
            StateTensor((width - 1, dim), self.conv_weight.dtype),
            StateTensor((self.heads, self.head_dim, self.head_dim), state_dtype),
        )

    def log_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        dtype = self.conv_weight.dtype
        return (
            conv1d_log(len(self.conv_weight), dtype),
            *kda_log(self.heads, self.head_dim, self.head_dim, dtype, state_dtype),
        )

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        context = current_context()
        (conv_state, recurrent_state), (conv_log, *token_log) = context.states[self.number], context.logs[self.number]
        shape = self.heads, self.head_dim
        qkv, decay, gate, b = self.in_proj(hidden_states[0]).split(
            [3 * self.heads * self.head_dim, self.head_dim, self.head_dim, self.heads], dim=-1
        )
        qkv = conv1d(qkv, self.conv_weight, None, conv_state, conv_log, context.indices, activation="silu")
        q, k, v = qkv.unflatten(-1, (3, *shape)).unbind(1)
        g = self.decay_proj(decay).unflatten(-1, shape)
        y = kda(q, k, v, g, b, self.A_log, self.dt_bias, recurrent_state, token_log, context.indices)
        gate = self.gate_proj(gate).unflatten(-1, shape)
        y = gated_rms_norm(y, gate, self.norm_weight, self.norm_eps, activation="sigmoid", round_normed=False)
        return self.out_proj(y.flatten(-2))[None]
