"""States on their way into the L2 cache before the program that reads them starts."""

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(128)  # bytes
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # Triton's interpreter knows no assembly


@triton.jit
def prefetch(place, SIZE: tl.constexpr):
    """Asks for SIZE elements, a power of 2, from a pointer on."""
    STEP: tl.constexpr = LINE * 8 // place.dtype.element_ty.primitive_bitwidth
    if not INTERPRETED:
        lines = (place + tl.arange(0, SIZE // STEP) * STEP).to(tl.int64, bitcast=True)
        code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(code, "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch_state(state, src, order, num_rows, slot_stride, TILE_SIZE: tl.constexpr, CONCURRENT: tl.constexpr):
    """For a grid (tiles of a state, rows in `order`): asks for the tile of the program that is CONCURRENT places later.

    That is about the one that follows on this processor. It finds its state in the cache, where otherwise it would wait
    for memory while nothing is computed. `slot_stride` and TILE_SIZE, a power of 2, count elements.
    """
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0) + CONCURRENT
    row = program // tl.num_programs(0)
    if row < num_rows:
        slot = tl.load(src + tl.load(order + row))
        prefetch(state + slot * slot_stride + program % tl.num_programs(0) * TILE_SIZE, TILE_SIZE)
