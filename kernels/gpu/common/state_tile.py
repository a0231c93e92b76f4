"""Lay out state tiles in registers as tensor cores leave products.

Loads and stores use the order in which threads hold elements, so threads exchange nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_elements(
    first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Return offsets and mask of a tile's elements."""
    warp = tl.arange(0, BLOCK_ROWS // 16)[None, None, :, None, None, None]
    half = tl.arange(0, 2)[None, None, None, :, None, None]
    row = first_row + warp * 16 + half * 8 + tl.arange(0, 8)[None, :, None, None, None, None]
    eighth = tl.arange(0, BLOCK_COLUMNS // 8)[None, None, None, None, :, None]
    quad = tl.arange(0, 4)[:, None, None, None, None, None]
    element = row * COLUMNS + eighth * 8 + quad * 2 + tl.arange(0, 2)[None, None, None, None, None, :]
    return element, (row < ROWS) & (eighth * 8 < COLUMNS)


@triton.jit
def load_tile(place, mask, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Load [BLOCK_ROWS, BLOCK_COLUMNS] in fp32."""
    tile = tl.load(place, mask=mask, other=0).to(tl.float32)
    return tl.reshape(tl.permute(tile, (2, 3, 1, 4, 0, 5)), [BLOCK_ROWS, BLOCK_COLUMNS])


@triton.jit
def store_tile(place, tile, mask):
    """Invert `load_tile`."""
    BLOCK_ROWS: tl.constexpr = tile.shape[0]
    BLOCK_COLUMNS: tl.constexpr = tile.shape[1]
    tile = tl.permute(tl.reshape(tile, [BLOCK_ROWS // 16, 2, 8, BLOCK_COLUMNS // 8, 4, 2]), (4, 2, 0, 1, 3, 5))
    tl.store(place, tile.to(place.dtype.element_ty), mask=mask)
