"""Run Mamba and Mamba2 layers."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from mambacache.kernels import StateTensor, conv1d, selective_scan, selective_scan_log, ssd, ssd_log
from mambacache.vllm.layers.base import StateLayer, conv_weight, in_order


class Mamba1(StateLayer, MambaMixer):
    """Runs as an opaque op, on [tokens, channels].

    Projections run in batch order: LoRA finds a token's adapter by its batch place.
    """

    def recurrent_log(self, *dtypes: torch.dtype) -> tuple[StateTensor, ...]:
        return selective_scan_log(*self.A.shape, *dtypes)

    def forward_impl(self, hidden_states: Tensor, output: Tensor) -> None:
        x, z = self.in_proj(hidden_states)[0].chunk(2, dim=-1)
        convolved, y = x.new_empty(x.shape), x.new_empty(x.shape)
        self._convolve(x, convolved)
        dt, B, C = self._ssm_transform(convolved)
        self._scan(convolved, dt.transpose(0, 1), B, C, z, y)  # dt is [channels, tokens]
        self.project_out(y, output)

    @in_order
    def _convolve(self, x: Tensor, out: Tensor) -> None:
        indices = self.indices(x)
        tokens = indices.num_tokens
        weight, bias, windows = conv_weight(self.conv1d), self.conv1d.bias, self._states[0]
        conv1d(x[:tokens], weight, bias, windows, self._conv_log, indices, out=out[:tokens])
        out[tokens:] = 0

    @in_order
    def _scan(self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, out: Tensor) -> None:
        indices = self.indices(x)
        tokens = indices.num_tokens
        x, dt, B, C, z = (each[:tokens] for each in (x, dt, B, C, z))
        bias, states = self._time_proj_bias(), self._states[1]
        selective_scan(x, dt, self.A, B, C, self.D, z, bias, states, self._token_log, indices, out=out[:tokens])
        out[tokens:] = 0


class Mamba2(StateLayer, MambaMixer2):
    """Leaves projections and gated norm to vLLM."""

    def recurrent_log(self, *dtypes: torch.dtype) -> tuple[StateTensor, ...]:
        _, (heads, P, N) = self.get_state_shape()
        return ssd_log(heads, self.groups_ssm_state_size // self.tp_size // N, P, N, *dtypes)

    @in_order
    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        indices = self.indices(projected_states)
        tokens = indices.num_tokens
        windows, states = self._states
        inner, state = self.tped_intermediate_size, self.groups_ssm_state_size // self.tp_size
        _, x, dt = projected_states[:tokens].split([inner, self.tped_conv_size, self.tped_dt_size], dim=-1)
        x = conv1d(x, conv_weight(self.conv1d), self.conv1d.bias, windows, self._conv_log, indices)
        x, B, C = x.split([inner, state, state], dim=-1)
        ssd(
            x.unflatten(-1, (-1, self.head_dim)),
            dt,
            self.A,
            B.unflatten(-1, (-1, self.ssm_state_size)),
            C.unflatten(-1, (-1, self.ssm_state_size)),
            self.D,
            None,
            self.dt_bias,
            states,
            self._token_log,
            indices,
            out=output[:tokens].unflatten(-1, (-1, self.head_dim)),
        )
        output[tokens:] = 0
