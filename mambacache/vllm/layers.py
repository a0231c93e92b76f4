"""vLLM's recurrent layers with our kernels in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from mambacache.kernels import StateIndices, conv1d, gated_delta_rule
from mambacache.kernels.state_pool import StateTensor
from mambacache.vllm.step_context import StepContext


class StateLayer:
    """Before one of vLLM's recurrent layers: its state is in our pool, not in vLLM's KV cache."""

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None

    def state_tensors(self) -> list[StateTensor]:
        """A state's tensors in vLLM's shapes and dtypes, which are those of our kernels: conv window first."""
        shapes, dtypes = self.get_state_shape(), self.get_state_dtype()
        return [StateTensor(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def bind_states(self, context: StepContext, views: tuple[Tensor, ...]) -> None:
        self._context = context
        self._states = views

    def indices(self, x: Tensor) -> StateIndices:
        """Of the step that runs, for activations [F, ...]."""
        return self._context.indices(len(x))


def conv_weight(conv: Any) -> Tensor:
    """[dim, W] of a convolution; vLLM's CPU build packs bf16 weights, and keeps a plain copy."""
    weight = getattr(conv, "_cpu_unpacked_conv_weight", None)
    if weight is None:
        weight = conv.weight
    return weight.view(weight.size(0), weight.size(-1))


class QwenGatedDeltaNet(StateLayer, QwenGatedDeltaNetAttention):
    """Qwen3-Next and Qwen3.5."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_fused_gdn_spec_decode = False
        self._forward_method = self.forward_cuda  # on a CPU too: it reaches _forward_core by the opaque op

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        indices = self.indices(mixed_qkv)
        tokens = indices.num_tokens
        windows, states = self._states
        x = conv1d(mixed_qkv[:tokens], conv_weight(self.conv1d), self.conv1d.bias, windows, indices)
        key, value = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = x.split([key, key, value], dim=-1)
        q, k = (each.unflatten(-1, (-1, self.head_k_dim)) for each in (q, k))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        out = core_attn_out[:tokens]
        gated_delta_rule(q, k, v, a[:tokens], b[:tokens], self.A_log, self.dt_bias, states, indices, out=out)
        core_attn_out[tokens:] = 0


LAYERS: dict[str, type] = {"QwenGatedDeltaNetAttention": QwenGatedDeltaNet}


def register() -> None:
    """Has vLLM build ours where it would build its own."""
    for name, layer in LAYERS.items():
        PluggableLayer.register_oot(name=name)(layer)


def check_all_ours(forward_context: Mapping[str, Any]) -> list[Any]:
    """The recurrent layers of a model, in order.

    Raises:
        ValueError: there is one whose state would not be in our pool.
    """
    recurrent = {name: layer for name, layer in forward_context.items() if isinstance(layer, MambaBase)}
    for name, layer in recurrent.items():
        if not isinstance(layer, StateLayer):
            raise ValueError(f"mambacache does not know the layer {name} ({type(layer).__name__}): set MAMBACACHE=0")
    return list(recurrent.values())
