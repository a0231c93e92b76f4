"""Rows of a state [ROWS, COLUMNS] in registers, as `state_tile` has them, but with 16 bytes of a row in each access.

A thread of a product's result holds pairs of columns. Two pairs of each 16 are 4 neighbours of the state here: columns
are in another order, and so are those of the product's other operand.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold_elements(
    first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Offsets in a state of the elements of a tile, and which of them are there."""
    warp = tl.arange(0, BLOCK_ROWS // 16)[None, None, :, None, None, None]
    half = tl.arange(0, 2)[None, None, None, :, None, None]
    row = first_row + warp * 16 + half * 8 + tl.arange(0, 8)[None, :, None, None, None, None]
    part = tl.arange(0, BLOCK_COLUMNS // 16)[None, None, None, None, :, None]
    quad = tl.arange(0, 4)[:, None, None, None, None, None]
    element = row * COLUMNS + part * 16 + quad * 4 + tl.arange(0, 4)[None, None, None, None, None, :]
    return element, (row < ROWS) & (part * 16 < COLUMNS)


@triton.jit
def fold_tile(elements, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """[BLOCK_ROWS, BLOCK_COLUMNS] in fp32 from what `fold_elements` places."""
    tile = tl.reshape(elements.to(tl.float32), [4, 8, BLOCK_ROWS // 16, 2, BLOCK_COLUMNS // 16, 2, 2])
    return tl.reshape(tl.permute(tile, (2, 3, 1, 4, 5, 0, 6)), [BLOCK_ROWS, BLOCK_COLUMNS])


@triton.jit
def tile_elements(tile):
    """What `fold_elements` places, from a tile."""
    BLOCK_ROWS: tl.constexpr = tile.shape[0]
    BLOCK_COLUMNS: tl.constexpr = tile.shape[1]
    tile = tl.reshape(tile, [BLOCK_ROWS // 16, 2, 8, BLOCK_COLUMNS // 16, 2, 4, 2])
    return tl.reshape(tl.permute(tile, (5, 2, 0, 1, 3, 4, 6)), [4, 8, BLOCK_ROWS // 16, 2, BLOCK_COLUMNS // 16, 4])


@triton.jit
def fold_columns(x):
    """[ROWS, COLUMNS] with its columns in a tile's order."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, [ROWS, COLUMNS // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
    return tl.reshape(x, [ROWS, COLUMNS])
