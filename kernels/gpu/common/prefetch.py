"""Prefetch into L2."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import ROW_FIELDS, SRC_FIELD

LINE = tl.constexpr(128)  # bytes
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # no assembly


@triton.jit
def prefetch(places, SIZE: tl.constexpr):
    """Prefetch SIZE elements, a power of 2 of lines."""
    STEP: tl.constexpr = LINE * 8 // places.dtype.element_ty.primitive_bitwidth
    if not INTERPRETED:
        lines = (places + (tl.arange(0, (SIZE + STEP - 1) // STEP) * STEP)[None, :]).to(tl.int64, bitcast=True)
        code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(code, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def later_tile(
    state,
    rows,
    num_rows,
    slot_stride,
    row,
    tile,
    TILES: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    CONCURRENT: tl.constexpr,
):
    """Return the state tile CONCURRENT programs later, about the next on this processor.

    Call it before a program's own loads, which would delay it.
    """
    later = tile + CONCURRENT
    row = tl.minimum(row + later // TILES, num_rows - 1)
    slot = tl.load(rows + row * ROW_FIELDS + SRC_FIELD)
    return state + slot * slot_stride + later % TILES * TILE_SIZE
