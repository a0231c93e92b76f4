"""Short convolution layers of LFM2."""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.layers.mamba.short_conv import ShortConv as VllmShortConv

from mambacache.kernels import conv1d
from mambacache.vllm.layers.base import StateLayer, conv_weight, in_order


class ShortConv(StateLayer, VllmShortConv):
    """The whole layer is one opaque op."""

    @in_order
    def forward_cuda(self, hidden_states: Tensor, output: Tensor) -> None:
        B, C, x = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        indices = self.indices(hidden_states)
        tokens = indices.num_tokens
        (windows,) = self._states
        weight, bias = conv_weight(self.conv), self.conv.bias
        y = conv1d(x[:tokens], weight, bias, windows, self._conv_log, indices, None, B[:tokens], C[:tokens])
        output[:tokens] = self.out_proj(y)[0]
        output[tokens:] = 0

    forward_native = forward_cuda  # which vLLM calls on a CPU
