"""Lay out state tiles in registers with 16 bytes per access.

Columns are permuted, so two pairs of a thread are neighbours in the state. `fold_columns` permutes the other operand.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold_elements(
    first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Return offsets and mask of a tile's elements."""
    warp = tl.arange(0, BLOCK_ROWS // 16)[None, None, :, None, None, None]
    half = tl.arange(0, 2)[None, None, None, :, None, None]
    row = first_row + warp * 16 + half * 8 + tl.arange(0, 8)[None, :, None, None, None, None]
    part = tl.arange(0, BLOCK_COLUMNS // 16)[None, None, None, None, :, None]
    quad = tl.arange(0, 4)[:, None, None, None, None, None]
    element = row * COLUMNS + part * 16 + quad * 4 + tl.arange(0, 4)[None, None, None, None, None, :]
    return element, (row < ROWS) & (part * 16 < COLUMNS)


@triton.jit
def fold_tile(elements, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return [BLOCK_ROWS, BLOCK_COLUMNS] in fp32."""
    tile = tl.reshape(elements.to(tl.float32), [4, 8, BLOCK_ROWS // 16, 2, BLOCK_COLUMNS // 16, 2, 2])
    return tl.reshape(tl.permute(tile, (2, 3, 1, 4, 5, 0, 6)), [BLOCK_ROWS, BLOCK_COLUMNS])


@triton.jit
def tile_elements(tile):
    """Return elements of a tile: invert `fold_tile`."""
    BLOCK_ROWS: tl.constexpr = tile.shape[0]
    BLOCK_COLUMNS: tl.constexpr = tile.shape[1]
    tile = tl.reshape(tile, [BLOCK_ROWS // 16, 2, 8, BLOCK_COLUMNS // 16, 2, 4, 2])
    return tl.reshape(tl.permute(tile, (5, 2, 0, 1, 3, 4, 6)), [4, 8, BLOCK_ROWS // 16, 2, BLOCK_COLUMNS // 16, 4])


@triton.jit
def fold_columns(x):
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, [ROWS, COLUMNS // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
    return tl.reshape(x, [ROWS, COLUMNS])
