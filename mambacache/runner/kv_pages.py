"""Allocate device memory for KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mambacache.kernels import StatePool, StateTensor, state_bytes
from mambacache.kernels.state_pool import ALIGNMENT, StateLayers
from mambacache.models.layer import KVLayer


def _tensors(layers: Sequence[KVLayer], block_size: int) -> list[tuple[StateTensor, StateTensor]]:

    def page(layer: KVLayer, dim: int) -> StateTensor:
        return StateTensor((block_size, layer.heads, dim), layer.dtype, per_token=True)

    return [(page(layer, layer.key_dim), page(layer, layer.value_dim)) for layer in layers]


def kv_block_bytes(layers: Sequence[KVLayer], block_size: int) -> int:
    return state_bytes(_tensors(layers, block_size))


def allocate_kv_pages(
    layers: Sequence[KVLayer], num_blocks: int, block_size: int, device: torch.device | str = "cpu"
) -> StatePool | None:
    """Return key pages [num_blocks + 1, block_size, heads, key_dim] and value pages."""
    return StatePool(_tensors(layers, block_size), num_blocks, device) if layers else None


@dataclass(frozen=True)
class Slab:
    """Describes a slab of `states` or `pages`."""

    states: int
    pages: int
    nbytes: int

    def lost(self, state: int, page: int) -> float:
        return 1 - min(self.states * state, self.pages * page) / self.nbytes


def slab_of(state: int, page: int) -> Slab:
    """Choose a slab of the larger block's size, or of the fewest smaller blocks that reach it."""
    small, large = sorted((state, page))
    few, many = large // small, -(-large // small)
    unit = few * ALIGNMENT
    sizes = {few: -(-large // unit) * unit, many: many * small}
    slabs = [Slab(*((1, n) if state > page else (n, 1)), nbytes) for n, nbytes in sizes.items()]
    return min(slabs, key=lambda slab: slab.lost(state, page))


def allocate_slabs(
    state_layers: StateLayers, kv_layers: Sequence[KVLayer], num_slabs: int, slab: Slab, block_size: int,
    device: torch.device | str = "cpu",
) -> tuple[StatePool, StatePool]:  # fmt: skip
    """Return pools of states and KV pages in one memory, with slab 0 for null blocks."""
    buffer = torch.empty((num_slabs + 1) * slab.nbytes, dtype=torch.uint8, device=device)
    return (
        StatePool.from_tensor(buffer, state_layers, slab.nbytes // slab.states),
        StatePool.from_tensor(buffer, _tensors(kv_layers, block_size), slab.nbytes // slab.pages),
    )
