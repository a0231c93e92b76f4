"""Share decode over token logs.

One launch logs new tokens and reads states; another folds rows with a dst. Bits do not depend on how tokens are cut
into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mambacache.plan import FOLD

from ...device import processors
from ...indices import ARRIVALS_WIDTH
from .layout import slot_elements
from .prefetch import INTERPRETED, prefetch
from .structs import aggregate

WINDOW = tl.constexpr(FOLD)
ARRIVALS_STRIDE = tl.constexpr(ARRIVALS_WIDTH)
LEAST_DECAY = tl.constexpr(-34.6)  # see `kernels.logs`
LEAST_WIDTH = 64
"""Least width of keys. With one channel a thread the compiler would round by the step's length."""
ROWS, PROGRAM_TILES = 16, 4  # lines a tile, most tiles a program
REGISTERS = 1 << 16  # per multiprocessor
FOLD_SHARE = 4  # one row in FOLD_SHARE has its own fold programs
FOLD_FIELDS = tl.constexpr(5)  # in `StateIndices.folds`

DECODE_ARRAYS = "decode_src", "decode_dst", "decode_len", "log_slot", "log_start", "log_end", "depths", "arrivals"
FOLD_ARRAYS = ("folds",)


def most_tiles(rows: int) -> int:
    """Return the most tiles per program for a state of `rows` lines, a power of 2."""
    return min(rows // ROWS & -(rows // ROWS), PROGRAM_TILES)


def registers(columns: int) -> int:
    """Return registers per thread; above 128 half the programs run."""
    return 128 if columns <= 128 else 255


def tile_bits(rows: int, columns: int, states: int, device: int) -> int:
    """Return log2 of tiles per program: the fewest that let all programs run."""
    bits, programs = most_tiles(rows).bit_length() - 1, states * (rows // ROWS)
    room = REGISTERS // (32 * registers(columns)) * processors(device)
    return next((few for few in range(bits) if programs >> few <= room), bits)


def scratch(like: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return aligned fp32 tensors; `sizes` are multiples of 4."""
    return torch.empty(sum(sizes), dtype=torch.float32, device=like.device).split(list(sizes))


@triton.jit
def slot_of(log, slot, stride):
    return log + slot * slot_elements(stride, log)


@aggregate
class DecodeRow:
    """Hold a row's log entries, `start` to `end`, and `length` of `tokens` new tokens."""

    row: tl.tensor
    slot: tl.tensor
    start: tl.tensor
    end: tl.tensor
    length: tl.tensor
    depths: tl.tensor
    tokens: tl.tensor


@triton.jit
def decode_row(row, lengths, slots, starts, ends, depths, tokens):
    slot, start, end = tl.load(slots + row).to(tl.int64), tl.load(starts + row), tl.load(ends + row)
    return DecodeRow(row, slot, start, end, tl.load(lengths + row), tl.load(depths + row), tokens)


@triton.jit
def depth_of(depths, token):
    return depths >> 4 * token & 15


@triton.jit
def parent_place(depths, token, end):
    place = end - 1
    for earlier in range(token):
        place = tl.where(depth_of(depths, earlier) == depth_of(depths, token) - 1, end + earlier, place)
    return place


@aggregate
class Fold:
    """Hold a tile's fold of entries `start` to `last`, included."""

    head: tl.tensor
    tile: tl.tensor
    source: tl.tensor
    target: tl.tensor
    slot: tl.tensor
    start: tl.tensor
    last: tl.tensor


@triton.jit
def task_of_fold(folds, task, HEADS: tl.constexpr, TILES: tl.constexpr):
    fields = folds + 1 + task // (HEADS * TILES) * FOLD_FIELDS
    source, target, slot = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2).to(tl.int64)
    head, tile = task // TILES % HEADS, task % TILES
    return Fold(head, tile, source, target, slot, tl.load(fields + 3), tl.load(fields + 4) - 1)


@triton.jit
def wait_for_previous_launch(PDL: tl.constexpr):
    """Wait for the launch before, if launches overlap; until then read nothing that it writes.

    Programs without work wait too, or this launch could end first. The fold may read at once everything that decode
    does not write.
    """
    if PDL and not INTERPRETED:
        gdc_wait()


@triton.jit
def next_launch_may_begin(PDL: tl.constexpr):
    if PDL and not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def _count(arrivals, last, ORDER: tl.constexpr):
    """Count a program; the last resets to 0."""
    code: tl.constexpr = (
        """
    {
    .reg .pred first;
    mov.u32 $0, %tid.x;
    setp.eq.u32 first, $0, 0;
    @first red."""
        + ORDER
        + """.gpu.global.inc.u32 [$1], $2;
    }
    """
    )
    place = [arrivals.to(tl.int64, bitcast=True), last]
    tl.inline_asm_elementwise(code, "=&r,l,r,~{memory}", place, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def arrive(arrivals, PREPARING: tl.constexpr, waiting):
    """Publish a preparing program's stores."""
    if not INTERPRETED:
        tl.debug_barrier()
        _count(arrivals, PREPARING + waiting - 1, "release")


@triton.jit
def wait_for_arrivals(arrivals, PREPARING: tl.constexpr, waiting):
    """Wait for preparing programs, which start first."""
    if not INTERPRETED:
        code: tl.constexpr = """
        {
        .reg .pred missing;
        AGAIN:
        ld.acquire.gpu.global.u32 $0, [$1];
        setp.lt.u32 missing, $0, $2;
        @missing bra AGAIN;
        bar.warp.sync 0xffffffff;
        }
        """
        place = [arrivals.to(tl.int64, bitcast=True), PREPARING]
        tl.inline_asm_elementwise(code, "=&r,l,r,~{memory}", place, dtype=tl.int32, is_pure=False, pack=1)
        _count(arrivals, PREPARING + waiting - 1, "relaxed")


@triton.jit
def tile_rows(BLOCK_ROWS: tl.constexpr):
    """Return lines [4, BLOCK_ROWS / 4]; a thread has neighbours."""
    SHARE: tl.constexpr = BLOCK_ROWS // 4
    return tl.arange(0, 4)[:, None] * SHARE + tl.arange(0, SHARE)[None, :]


@triton.jit
def tile_columns(BLOCK_COLUMNS: tl.constexpr):
    """Return columns; 8 threads read a memory line."""
    column = tl.arange(0, BLOCK_COLUMNS // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return column[None, None]


@triton.jit
def load_state(place, mask, again):
    """Load a state, evicted first unless the fold reads it."""
    if again:
        S = tl.load(place, mask=mask, other=0)
    else:
        S = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
    return S.to(tl.float32)


@triton.jit
def for_rows(place, columns, mask):
    SHAPE: tl.constexpr = [4, 1, columns.shape[2], 32]
    return tl.load(tl.broadcast_to(place + columns, SHAPE), mask=mask, other=0)


@triton.jit
def entry_scores(place):
    return tl.load(tl.broadcast_to(place + tl.arange(0, WINDOW)[None, None, :], [4, 1, WINDOW]))


@triton.jit
def prefetch_entries(log, start, end, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """Prefetch entries, or they would wait behind the state."""
    entry = tl.maximum(tl.minimum(tl.arange(0, WINDOW), end - 1), start)
    prefetch(log + (entry * STRIDE)[:, None], SIZE)


@triton.jit
def entry_values(log, row, value, STRIDE: tl.constexpr):
    entry = tl.arange(0, WINDOW)
    place = log + (entry * STRIDE)[None, None, :] + value[:, :, None]
    inside = (entry >= row.start) & (entry < row.end)
    return tl.load(place, mask=inside[None, None, :] & (value >= 0)[:, :, None], other=0).to(tl.float32)


@triton.jit
def row_sums(met, logged):
    """Sum over states and entries, within a thread first."""
    SHARE: tl.constexpr = met.shape[1]
    met = tl.sum(tl.reshape(met, [4, SHARE, 8, 4]), axis=3)
    return tl.sum(met + tl.sum(tl.reshape(logged, [4, SHARE, 8, WINDOW // 8]), axis=3), axis=2)
