"""Run Kimi Delta Attention layers of Kimi-Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

from mambacache.kernels import StateTensor, conv1d, gated_rms_norm, kda, kda_log
from mambacache.vllm.layers.base import StateLayer, conv_weight, in_order


class KimiDeltaAttention(StateLayer, KimiGatedDeltaNetAttention):
    """Runs the steps between projections; raises ValueError for decay with a lower bound, as in Kimi-K3."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.gate_lower_bound is not None:
            raise ValueError(
                f"mambacache does not know gates with a lower bound, and {self.prefix} has one of "
                f"{self.gate_lower_bound}: set MAMBACACHE=0"
            )

    def recurrent_log(self, *dtypes: torch.dtype) -> tuple[StateTensor, ...]:
        _, (heads, V, K) = self.get_state_shape()
        return kda_log(heads, K, V, *dtypes)

    @eager_break_during_capture
    def _forward(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
        self._run(mixed_qkv, g1[0], g2, beta[0], core_attn_out[0])

    @in_order
    def _run(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, out: Tensor) -> None:
        indices = self.indices(mixed_qkv)
        tokens = indices.num_tokens
        windows, states = self._states
        x = conv1d(mixed_qkv[:tokens], conv_weight(self.conv1d), self.conv1d.bias, windows, self._conv_log, indices)
        q, k, v = x.unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        y = kda(q, k, v, g1[:tokens], beta[:tokens], self.A_log, self.dt_bias, states, self._token_log, indices)
        gated_rms_norm(
            y,
            g2[:tokens],
            self.o_norm.weight,
            self.o_norm.eps,
            activation="sigmoid",
            round_normed=False,
            out=out[:tokens],
        )
        out[tokens:] = 0
