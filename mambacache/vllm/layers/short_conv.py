"""Run short convolution layers of LFM2."""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers.mamba.short_conv import ShortConv as VllmShortConv

from mambacache.kernels import conv1d
from mambacache.vllm.layers.base import StateLayer, conv_weight, in_order


class ShortConv(StateLayer, VllmShortConv):
    """Runs as an opaque op, with projections in batch order."""

    def forward_cuda(self, hidden_states: Tensor, output: Tensor) -> None:
        B, C, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        y = x.new_empty(x.shape)
        self._convolve(x, B, C, y)
        self.project_out(y, output)

    @in_order
    def _convolve(self, x: Tensor, B: Tensor, C: Tensor, out: Tensor) -> None:
        indices = self.indices(x)
        tokens = indices.num_tokens
        (windows,) = self._states
        weight, bias, gates = conv_weight(self.conv), self.conv.bias, (B[:tokens], C[:tokens])
        conv1d(x[:tokens], weight, bias, windows, self._conv_log, indices, None, *gates, out=out[:tokens])
        out[tokens:] = 0

    forward_native = forward_cuda  # called on a CPU
