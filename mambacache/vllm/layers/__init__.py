"""Replace vLLM's recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase

from mambacache.vllm.layers.base import StateLayer
from mambacache.vllm.layers.gated_delta_net import OlmoHybridGatedDeltaNet, QwenGatedDeltaNet
from mambacache.vllm.layers.kimi_delta_attention import KimiDeltaAttention
from mambacache.vllm.layers.mamba import Mamba1, Mamba2
from mambacache.vllm.layers.short_conv import ShortConv

LAYERS: dict[str, type] = {
    "QwenGatedDeltaNetAttention": QwenGatedDeltaNet,
    "OlmoHybridGatedDeltaNetAttention": OlmoHybridGatedDeltaNet,
    "KimiGatedDeltaNetAttention": KimiDeltaAttention,
    "MambaMixer": Mamba1,
    "MambaMixer2": Mamba2,
    "ShortConv": ShortConv,
}


@contextmanager
def built() -> Iterator[None]:
    """Make vLLM build our layers, in this context only: other models stay vLLM's."""
    names = [name for name in LAYERS if name not in op_registry_oot]  # `check_all_ours` finds another plugin's
    for name in names:
        PluggableLayer.register_oot(name=name)(LAYERS[name])
    try:
        yield
    finally:
        for name in names:
            del op_registry_oot[name]


def check_all_ours(forward_context: Mapping[str, Any]) -> list[Any]:
    """Return a model's recurrent layers in order, or raise ValueError for a foreign layer."""
    recurrent = {name: layer for name, layer in forward_context.items() if isinstance(layer, MambaBase)}
    for name, layer in recurrent.items():
        if not isinstance(layer, StateLayer):
            raise ValueError(f"mambacache does not know the layer {name} ({type(layer).__name__}): set MAMBACACHE=0")
    return list(recurrent.values())


def check_no_drafter(layers: Sequence[Any], model: nn.Module) -> None:
    """Raise ValueError for recurrent layers of a draft model."""
    modules = set(model.modules())
    if any(layer not in modules for layer in layers):
        raise ValueError(
            "mambacache does not know models that draft and have recurrent layers: leave out --speculative-config, or "
            "set MAMBACACHE=0"
        )


def check_stage(forward_context: Mapping[str, Any]) -> None:
    """Raise ValueError unless a pipeline stage has recurrent layers for our pool, and attention for vLLM's KV."""
    layers = [layer for layer in forward_context.values() if isinstance(layer, AttentionLayerBase)]
    recurrent = sum([isinstance(layer, MambaBase) for layer in layers])
    if recurrent in (0, len(layers)):
        raise ValueError(
            f"mambacache: a pipeline stage has {recurrent} recurrent and {len(layers) - recurrent} attention layers, "
            "and needs both: set VLLM_PP_LAYER_PARTITION, or MAMBACACHE=0"
        )
