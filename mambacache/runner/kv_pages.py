"""Device memory of attention's keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mambacache.models.layer import KVLayer

KVPages = list[tuple[torch.Tensor, torch.Tensor]]


def kv_block_bytes(layers: Sequence[KVLayer], block_size: int) -> int:
    """Bytes of one KV block: `block_size` tokens' keys and values of all attention layers."""
    return sum(block_size * x.heads * (x.key_dim + x.value_dim) * x.dtype.itemsize for x in layers)


def allocate_kv_pages(
    layers: Sequence[KVLayer], num_blocks: int, block_size: int, device: torch.device | str = "cpu"
) -> KVPages:
    """For each attention layer its key pages [num_blocks + 1, block_size, heads, key_dim] and value pages."""

    def pages(layer: KVLayer, dim: int) -> torch.Tensor:
        return torch.empty(num_blocks + 1, block_size, layer.heads, dim, dtype=layer.dtype, device=device)

    return [(pages(layer, layer.key_dim), pages(layer, layer.value_dim)) for layer in layers]
