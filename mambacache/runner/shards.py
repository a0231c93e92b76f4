"""Compute block sizes under tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mambacache.config import EngineConfig
from mambacache.kernels import state_bytes
from mambacache.models.adapt import Model
from mambacache.models.layer import KVLayer
from mambacache.runner.kv_pages import kv_block_bytes

HEADS = "heads", "key_heads", "value_heads", "groups"
"""Attributes of recurrent layers, divided among GPUs."""


@dataclass(frozen=True)
class ShardSizes:
    state: int
    log: int
    page: int


def shard_sizes(config: EngineConfig, model: Model, ranks: int) -> ShardSizes:
    """Return the sizes on each GPU; cut the recurrent layers of `model`, or raise ValueError."""
    for mixer in model.mixers:
        _divide(mixer, ranks)
    dtype = getattr(torch, config.state_dtype)
    pages = [_divided_kv(layer, model.config, ranks) for layer in model.kv_layers]
    return ShardSizes(
        state_bytes(model.state_layers(dtype)),
        state_bytes(model.log_layers(dtype)),
        kv_block_bytes(pages, config.block_size),
    )


def _divide(mixer: Any, ranks: int) -> None:
    channels, width = mixer.conv_weight.shape
    if getattr(mixer, "groups", ranks) % ranks:  # vLLM copies a group to each GPU
        channels += 2 * (ranks - mixer.groups) * mixer.state_dim
        mixer.groups = ranks
    for name in HEADS:
        if hasattr(mixer, name):
            setattr(mixer, name, _part(name, getattr(mixer, name), ranks))
    mixer.conv_weight = _empty(mixer.conv_weight, _part("channels", channels, ranks), width)
    if not hasattr(mixer, "heads") and hasattr(mixer, "A"):  # Mamba1
        mixer.A = _empty(mixer.A, _part("channels", len(mixer.A), ranks), mixer.A.shape[1])


def _part(name: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise ValueError(
            f"tensor_parallel_size is {ranks} and a recurrent layer has {count} {name.replace('_', ' ')}: set it to a "
            "divisor"
        )
    return count // ranks


def _empty(like: torch.Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(like.new_empty(shape), requires_grad=False)


def _divided_kv(layer: KVLayer, config: Any, ranks: int) -> KVLayer:
    """Return a layer's KV on a GPU: at least a head, or the latent vector (MLA)."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None:
        return KVLayer(1, rank + config.qk_rope_head_dim, 0, layer.dtype)
    return KVLayer(max(layer.heads // ranks, 1), layer.key_dim, layer.value_dim, layer.dtype)
