"""Define the base of our layers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from mambacache.kernels import StateIndices, conv1d_log, gated_rms_norm
from mambacache.kernels.state_pool import StateTensor
from mambacache.vllm.config import LAYOUT
from mambacache.vllm.step_context import StepContext


class StateLayer:
    """Keeps a vLLM layer's state in our pool; padding gets zeros."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_spec = 0  # drafts are in the token log

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return vLLM's shapes, with a window [W - 1, dim] in layout DS too."""
        window, *states = super().get_state_shape()
        return (window[::-1] if os.environ.get(LAYOUT) == "DS" else window, *states)

    def state_tensors(self) -> list[StateTensor]:
        """Return a state's tensors, window first."""
        shapes, dtypes = self.get_state_shape(), self.get_state_dtype()
        return [StateTensor(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def log_tensors(self) -> list[StateTensor]:
        """Return a token log's tensors, convolution first."""
        (_, dim), *_ = self.get_state_shape()
        dtype, *_ = self.get_state_dtype()
        return [conv1d_log(dim, dtype), *self.recurrent_log(*self.get_state_dtype())]

    def recurrent_log(self, *dtypes: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the recurrence's tensors, by dtypes of activations and states."""
        return ()

    def bind_states(self, context: StepContext, states: tuple[Tensor, ...], logs: tuple[Tensor, ...]) -> None:
        self._context = context
        self._states = states
        self._conv_log, *self._token_log = logs

    def indices(self, x: Tensor) -> StateIndices:
        return self._context.indices(len(x))

    def project_out(self, y: Tensor, output: Tensor) -> None:
        """Project y [F, ...] into `output`, both in batch order."""
        order = self._context.order
        tokens = self.indices(y).num_tokens if order is None else len(order.back)
        output[:tokens] = self.out_proj(y)[0][:tokens]
        output[tokens:] = 0


Core = Callable[..., None]


def in_order(core: Core) -> Core:
    """Run a method, which fills the last of its activations [F, ...], in index order."""

    @wraps(core)
    def ordered(layer: Any, *args: Tensor, **named: Tensor) -> None:
        order = layer._context.order
        if order is None:
            core(layer, *args, **named)
            return
        *inputs, out = [*args, *named.values()]
        y = out.new_empty(len(order.taken), *out.shape[1:])
        core(layer, *(x[order.taken] for x in inputs), y)
        out[: len(order.back)] = y[order.back]
        out[len(order.back) :] = 0

    return ordered


class GatedNorm(nn.Module):
    """Replaces vLLM's gated norm, outside torch.compile."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps)


def conv_weight(conv: Any) -> Tensor:
    """Return a weight [dim, W]; vLLM's CPU build packs bf16 and keeps a copy."""
    conv = getattr(conv, "base_layer", conv)  # LoRA wraps linear layers
    weight = getattr(conv, "_cpu_unpacked_conv_weight", None)
    if weight is None:
        weight = conv.weight
    return weight.view(weight.size(0), weight.size(-1))
