"""Device memory of attention's keys and values, and of states in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mambacache.kernels import StatePool, StateTensor, state_bytes
from mambacache.kernels.state_pool import ALIGNMENT, StateLayers
from mambacache.models.layer import KVLayer


def _tensors(layers: Sequence[KVLayer], block_size: int) -> list[tuple[StateTensor, StateTensor]]:
    """For each attention layer the key page and the value page of one block."""

    def page(layer: KVLayer, dim: int) -> StateTensor:
        return StateTensor((block_size, layer.heads, dim), layer.dtype, per_token=True)

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


@dataclass(frozen=True)
class Slab:
    """A piece of one memory for both kinds of blocks: it holds so many states, or so many KV pages; one of them is 1.

    Blocks lie `nbytes` / their number apart, so that slab i holds those with ids from i times their number on.
    """

    states: int
    pages: int
    nbytes: int

    def lost(self, state: int, page: int) -> float:
        """The share of it that blocks of these sizes leave unused at most."""
        return 1 - min(self.states * state, self.pages * page) / self.nbytes


def slab_of(state: int, page: int) -> Slab:
    """The slab that loses least by rounding, for blocks of so many bytes: as large as the larger kind, or as the fewest
    of the smaller kind that are no smaller than it."""
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
    """Pools of states and of KV pages in so many slabs of one memory, beside slab 0 with both null blocks."""
    buffer = torch.empty((num_slabs + 1) * slab.nbytes, dtype=torch.uint8, device=device)
    return (
        StatePool.from_tensor(buffer, state_layers, slab.nbytes // slab.states),
        StatePool.from_tensor(buffer, _tensors(kv_layers, block_size), slab.nbytes // slab.pages),
    )
