"""Memory on its way into the L2 cache before it is read."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import ROW_FIELDS, SRC_FIELD

LINE = tl.constexpr(128)  # bytes
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # Triton's interpreter knows no assembly


@triton.jit
def prefetch(places, SIZE: tl.constexpr):
    """Asks for SIZE elements from each of some pointers on, [N, 1] or one alone: a power of 2 of lines."""
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
    """For programs that take the TILES tiles of one prefill row after the other: where the tile of the program that
    comes CONCURRENT places later begins.

    That is about the one that follows on this processor. Once asked for, it finds its state in the cache, where
    otherwise it would wait for memory while nothing is computed. `slot_stride` and TILE_SIZE count elements. To be
    called before a program's own loads, behind which it would have to wait.
    """
    later = tile + CONCURRENT
    row = tl.minimum(row + later // TILES, num_rows - 1)
    slot = tl.load(rows + row * ROW_FIELDS + SRC_FIELD)
    return state + slot * slot_stride + later % TILES * TILE_SIZE
