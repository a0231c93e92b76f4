"""Device memory of attention's keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mambacache.kernels import StatePool, StateTensor, state_bytes
from mambacache.models.layer import KVLayer


def _tensors(layers: Sequence[KVLayer], block_size: int) -> list[tuple[StateTensor, StateTensor]]:
    """For each attention layer the key page and the value page of one block."""

    def page(layer: KVLayer, dim: int) -> StateTensor:
        return StateTensor((block_size, layer.heads, dim), layer.dtype)

    return [(page(layer, layer.key_dim), page(layer, layer.value_dim)) for layer in layers]


def kv_block_bytes(layers: Sequence[KVLayer], block_size: int) -> int:
    """Bytes of one KV block: `block_size` tokens' keys and values of all attention layers, aligned as a state is."""
    return state_bytes(_tensors(layers, block_size))


def allocate_kv_pages(
    layers: Sequence[KVLayer], num_blocks: int, block_size: int, device: torch.device | str = "cpu"
) -> StatePool | None:
    """A pool whose blocks are contiguous, as states are; its `layers` are, for each attention layer, its key pages
    [num_blocks + 1, block_size, heads, key_dim] and value pages. None without such layers."""
    return StatePool(_tensors(layers, block_size), num_blocks, device) if layers else None
