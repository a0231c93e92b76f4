"""Implement Gated DeltaNet layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mambacache.kernels import (
    StateTensor,
    conv1d,
    conv1d_log,
    gated_delta_rule,
    gated_delta_rule_log,
    gated_rms_norm,
)
from mambacache.models.layer import current_context
from mambacache.models.projection import fuse


class GatedDeltaNet(nn.Module):
    """Runs a Gated DeltaNet layer over the state pool.

    A state is a conv window [W - 1, 2 * H * K + HV * V] of raw queries, keys and values, and matrices [HV, V, K].

    Args:
        in_proj: maps to [queries, keys, values, gate, a, b].
        beta_scale: 2 with negative eigenvalues, else 1.
    """

    number: int

    def __init__(
        self, source: Any, in_proj: nn.Module, norm: Any, out_proj: nn.Module, beta_scale: float = 1.0
    ) -> None:
        super().__init__()
        if source.activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act is {source.activation!r}: Gated DeltaNet layers run with 'silu' only")
        self.key_heads, self.value_heads = source.num_k_heads, source.num_v_heads
        self.key_dim, self.value_dim = source.head_k_dim, source.head_v_dim
        self.beta_scale = beta_scale
        self.in_proj, self.out_proj = in_proj, out_proj
        self.conv_weight = nn.Parameter(source.conv1d.weight.detach().squeeze(1), requires_grad=False)
        self.conv_bias = source.conv1d.bias
        self.A_log, self.dt_bias = source.A_log, source.dt_bias
        self.norm_weight, self.norm_eps = norm.weight, norm.variance_epsilon

    def state_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        dim, width = self.conv_weight.shape
        return (
            StateTensor((width - 1, dim), self.conv_weight.dtype),
            StateTensor((self.value_heads, self.value_dim, self.key_dim), state_dtype),
        )

    def log_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        sizes = self.key_heads, self.value_heads, self.key_dim, self.value_dim
        dtype = self.conv_weight.dtype
        return (
            conv1d_log(len(self.conv_weight), dtype),
            *gated_delta_rule_log(*sizes, dtype, state_dtype),
        )

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        context = current_context()
        (conv_state, recurrent_state), (conv_log, *token_log) = context.states[self.number], context.logs[self.number]
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        qkv, gate, a, b = self.in_proj(hidden_states[0]).split(
            [2 * keys + values, values, self.value_heads, self.value_heads], dim=-1
        )
        qkv = conv1d(qkv, self.conv_weight, self.conv_bias, conv_state, conv_log, context.indices, activation="silu")
        q, k, v = qkv.split([keys, keys, values], dim=-1)
        y = gated_delta_rule(
            q.unflatten(-1, (self.key_heads, self.key_dim)),
            k.unflatten(-1, (self.key_heads, self.key_dim)),
            v.unflatten(-1, (self.value_heads, self.value_dim)),
            a,
            b,
            self.A_log,
            self.dt_bias,
            recurrent_state,
            token_log,
            context.indices,
            beta_scale=self.beta_scale,
        )
        y = gated_rms_norm(y, gate.unflatten(-1, (self.value_heads, self.value_dim)), self.norm_weight, self.norm_eps)
        return self.out_proj(y.flatten(-2))[None]


def from_qwen3_next(source: Any) -> GatedDeltaNet:
    """Build a layer whose projections interleave [query, key, values, gates] and [b, a] by key head."""
    groups, per_group = source.num_k_heads, source.num_v_heads // source.num_k_heads
    values = per_group * source.head_v_dim
    sizes = [source.head_k_dim, source.head_k_dim, values, values]
    qkvz = _deinterleave(groups, sizes)
    b, a = _deinterleave(groups, [per_group, per_group])
    offset = groups * sum(sizes)
    in_proj = fuse([source.in_proj_qkvz, source.in_proj_ba], torch.cat([*qkvz, offset + a, offset + b]))
    return GatedDeltaNet(source, in_proj, source.norm, source.out_proj)


def from_qwen3_5(source: Any) -> GatedDeltaNet:
    in_proj = fuse([source.in_proj_qkv, source.in_proj_z, source.in_proj_a, source.in_proj_b])
    return GatedDeltaNet(source, in_proj, source.norm, source.out_proj)


def from_olmo_hybrid(source: Any) -> GatedDeltaNet:
    in_proj = fuse([source.q_proj, source.k_proj, source.v_proj, source.g_proj, source.a_proj, source.b_proj])
    return GatedDeltaNet(source, in_proj, source.o_norm, source.o_proj, 2.0 if source.allow_neg_eigval else 1.0)


def _deinterleave(groups: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    rows = torch.arange(groups * sum(sizes), device="cpu").view(groups, -1)
    return [section.flatten() for section in rows.split(list(sizes), dim=1)]
