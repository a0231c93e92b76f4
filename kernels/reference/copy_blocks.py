"""Implement `copy_blocks`."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """See `mambacache.kernels.copy_blocks`."""
    for block, into in pairs.tolist():
        target[into].copy_(source[block])
