"""Implement `copy_blocks`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common.launch import NO_POINTERS, Launcher
from .common.layout import cdiv

PROGRAMS = 16
"""Enough to keep PCIe busy, few enough to leave the GPU to concurrent work."""

TILE = 4096  # words in flight
UNIT = 4  # words per access


@triton.jit(do_not_specialize=["count", "source_stride", "target_stride"])
def _copy_blocks_kernel(
    pairs,
    source,
    target,
    count,
    source_stride,
    target_stride,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Copy tiles in turn. Strides count accesses, so the compiler knows their alignment."""
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    for tile in range(tl.program_id(0), count * TILES, PROGRAMS):
        pair, word = tile // TILES, tile % TILES * TILE + tl.arange(0, TILE)
        read = tl.load(pairs + 2 * pair).to(tl.int64) * source_stride * UNIT
        written = tl.load(pairs + 2 * pair + 1).to(tl.int64) * target_stride * UNIT
        mask = word < WIDTH
        tl.store(target + written + word, tl.load(source + read + word, mask=mask), mask=mask)


_launch = Launcher(_copy_blocks_kernel)


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """See `mambacache.kernels.copy_blocks`."""
    if not len(pairs):
        return
    words = [x.view(pairs.dtype) for x in (source, target)]
    width = words[0].shape[1]
    _launch(
        min(PROGRAMS, len(pairs) * cdiv(width, TILE)),
        (pairs, *words),  # `pairs` first: the launcher takes its device
        NO_POINTERS,
        (len(pairs), *(x.stride(0) // UNIT for x in words)),
        {"WIDTH": width, "UNIT": UNIT, "TILE": TILE, "PROGRAMS": PROGRAMS},
        num_warps=8,
    )
