"""Lay out state tiles in registers as tensor cores leave products, so threads exchange nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from .structs import aggregate


@aggregate
class StateTile:
    state: tl.tensor
    stride: tl.tensor
    element: tl.tensor
    inside: tl.tensor


@triton.jit
def state_tile(
    state,
    stride,
    head,
    first_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    warp = tl.arange(0, BLOCK_ROWS // 16)[None, None, :, None, None, None]
    half = tl.arange(0, 2)[None, None, None, :, None, None]
    row = first_row + warp * 16 + half * 8 + tl.arange(0, 8)[None, :, None, None, None, None]
    eighth = tl.arange(0, BLOCK_COLUMNS // 8)[None, None, None, None, :, None]
    quad = tl.arange(0, 4)[:, None, None, None, None, None]
    element = row * COLUMNS + eighth * 8 + quad * 2 + tl.arange(0, 2)[None, None, None, None, None, :]
    inside = (row < ROWS) & (eighth * 8 < COLUMNS)
    return StateTile(state + head * ROWS * COLUMNS, stride, element, inside)


@triton.jit
def load_tile(tile, slot):
    """Load [BLOCK_ROWS, BLOCK_COLUMNS] in fp32; zeros for slot 0."""
    SHAPE: tl.constexpr = [tile.element.shape[2] * 16, tile.element.shape[4] * 8]
    place = tile.state + slot * tile.stride + tile.element
    S = tl.load(place, mask=tl.where(slot != 0, tile.inside, False), other=0).to(tl.float32)
    return tl.reshape(tl.permute(S, (2, 3, 1, 4, 0, 5)), SHAPE)


@triton.jit
def store_tile(tile, slot, S, MAY_BE_NULL: tl.constexpr = False):
    """Invert `load_tile`. Slot 0 needs MAY_BE_NULL, and takes nothing."""
    BLOCK_ROWS: tl.constexpr = S.shape[0]
    BLOCK_COLUMNS: tl.constexpr = S.shape[1]
    place = tile.state + slot * tile.stride + tile.element
    inside = tl.where(slot != 0, tile.inside, False) if MAY_BE_NULL else tile.inside
    S = tl.permute(tl.reshape(S, [BLOCK_ROWS // 16, 2, 8, BLOCK_COLUMNS // 8, 4, 2]), (4, 2, 0, 1, 3, 5))
    tl.store(place, S.to(place.dtype.element_ty), mask=inside)
