"""Run Gated DeltaNet layers of Qwen3-Next, Qwen3.5 and OLMo-Hybrid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from mambacache.kernels import StateTensor, conv1d, gated_delta_rule, gated_delta_rule_log
from mambacache.vllm.layers.base import GatedNorm, StateLayer, conv_weight, in_order


class GatedDeltaNet(StateLayer):
    """Runs the steps between projections and norm."""

    beta_scale = 1.0

    def recurrent_log(self, *dtypes: torch.dtype) -> tuple[StateTensor, ...]:
        _, (value_heads, V, K) = self.get_state_shape()
        return gated_delta_rule_log(self.key_dim // self.tp_size // K, value_heads, K, V, *dtypes)

    @in_order
    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        indices = self.indices(mixed_qkv)
        tokens = indices.num_tokens
        windows, states = self._states
        x = conv1d(mixed_qkv[:tokens], conv_weight(self.conv1d), self.conv1d.bias, windows, self._conv_log, indices)
        key, value = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = x.split([key, key, value], dim=-1)
        gated_delta_rule(
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
            a[:tokens],
            b[:tokens],
            self.A_log,
            self.dt_bias,
            states,
            self._token_log,
            indices,
            beta_scale=self.beta_scale,
            out=core_attn_out[:tokens],
        )
        core_attn_out[tokens:] = 0


class QwenGatedDeltaNet(GatedDeltaNet, QwenGatedDeltaNetAttention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_fused_gdn_spec_decode = False
        self._forward_method = self.forward_cuda  # on a CPU too: calls _forward_core


class OlmoHybridGatedDeltaNet(GatedDeltaNet, OlmoHybridGatedDeltaNetAttention):
    """Runs as an opaque op, norm included."""

    o_norm: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.beta_scale = 2.0 if self.allow_neg_eigval else 1.0
        self.o_norm = GatedNorm(self.o_norm)
