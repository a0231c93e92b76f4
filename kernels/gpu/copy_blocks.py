"""Blocks copied in one Triton launch, between a GPU's memory and pinned memory of its host as well."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common.launch import NO_POINTERS, Launcher
from .common.layout import cdiv

PROGRAMS = 16
"""Enough to keep PCIe busy, and few enough that a pass beside them has nearly all of the GPU."""

TILE = 4096  # words of 4 bytes that a program has on their way at a time
UNIT = 4  # words of an access


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
    """The tiles of all blocks, dealt out in turn. Strides are in units of an access, so that the compiler knows it."""
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
        (pairs, *words),  # the first one has a device; the others may be the host's
        NO_POINTERS,
        (len(pairs), *(x.stride(0) // UNIT for x in words)),
        {"WIDTH": width, "UNIT": UNIT, "TILE": TILE, "PROGRAMS": PROGRAMS},
        num_warps=8,
    )
