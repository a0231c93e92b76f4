"""Implement `keep_paths`."""

from __future__ import annotations

from torch import Tensor

from ..state_pool import StatePool


def keep_paths(pool: StatePool, paths: Tensor) -> None:
    """See `mambacache.kernels.keep_paths`."""
    for slot, first, *places in paths.tolist():
        for offset, count, size in pool.per_token:
            tokens = pool.slabs[slot, offset : offset + count * size].view(count, size)
            for target, place in enumerate([place for place in places if place >= 0], first):
                tokens[target] = tokens[place]
