"""What decode over a token log shares: windows, on the host and in kernels.

A row's state in memory stands at the last multiple of 16 tokens, or where its prompt ended, and its log holds what came
after: the token at position p in entry p % 16. With G_i, the sum of the log2 decays up to entry i, the state behind a
window of n entries is exp2(G_n) S + sum_i exp2(G_n - G_i) u_i k_i^T. A step's tokens of one row end at a multiple of 16
at the latest: then the row is folded, which makes a state of its state and its log, and the log begins anew. So what a
token gives depends on its position and on what stands before it alone, however tokens are cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mambacache.kernels.gpu.common.delta_rule import dot
from mambacache.kernels.gpu.common.prefetch import INTERPRETED

FOLD = 16  # states stand at multiples of so many tokens, and at the ends of prompts
WINDOW = tl.constexpr(FOLD)
ROWS, PROGRAM_TILES = 16, 4  # rows of a state that a program of decode takes at once, and how often
FOLD_ROWS, FOLD_PROGRAMS = 64, 1056


class Row(NamedTuple):
    """A decode row of one step.

    `slot` is that of its log, `first` the entry with which its window begins, `at` that of the step's first token. If
    the step's tokens fill the window, the state behind it goes to `dst`; 0 means that none is stored.
    """

    src: int
    slot: int
    first: int
    at: int
    length: int
    dst: int = 0


def row_arrays(rows: Sequence[Row], device: str) -> dict[str, torch.Tensor]:
    """int32 arrays: of rows, and as `folds` [1 + 4 rows] how many there are, then the src, dst, slot and first entry
    of each."""
    columns = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
    folds = [(row.src, row.dst, row.slot, row.first) for row in rows if row.dst and row.at + row.length == FOLD]
    columns["folds"] = (len(folds), *(field for fold in folds for field in fold), *[0] * 4 * (len(rows) - len(folds)))
    return {name: torch.tensor(column, dtype=torch.int32, device=device) for name, column in columns.items()}


def log_tensors(
    slots: int, entries: dict[str, tuple[tuple[int, ...], torch.dtype]], device: str
) -> dict[str, torch.Tensor]:
    """Tensors [slots, 16, *shape] that share one slab a slot, as those of a state do; full of NaN."""
    sizes = {name: FOLD * prod(shape) * dtype.itemsize for name, (shape, dtype) in entries.items()}
    parts = [-(-size // 256) * 256 for size in sizes.values()]
    slabs = torch.full((slots, sum(parts)), 255, dtype=torch.uint8, device=device).split(parts, dim=1)
    return {
        name: slab[:, : sizes[name]].view(dtype).unflatten(1, (FOLD, *shape))
        for slab, (name, (shape, dtype)) in zip(slabs, entries.items(), strict=True)
    }


def slot_units(log: torch.Tensor) -> int:
    """From one slot to the next in units of 16 bytes."""
    return log.stride(0) * log.element_size() // 16


@triton.jit
def slot_of(log, slot, stride):
    """A row's slot of one tensor of the log; `stride` counts 16 bytes."""
    return log + slot * (tl.cast(stride, tl.int64) * (128 // log.dtype.element_ty.primitive_bitwidth))


@triton.jit
def row_window(rows_slot, rows_first, rows_at, row):
    """A row's slot, the entry with which its window begins, and that of the step's first token."""
    return tl.load(rows_slot + row).to(tl.int64), tl.load(rows_first + row), tl.load(rows_at + row)


@triton.jit
def tiles_of_program(tiles, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """A program's decode row, its head, and the first of the ROWS rows of its state of which it takes some tiles."""
    programs = ROWS // BLOCK_ROWS // tiles
    row, program = tl.program_id(0) // (programs * HEADS), tl.program_id(0) % (programs * HEADS)
    return row, program // programs, program % programs * (tiles * BLOCK_ROWS)


@triton.jit
def task_of_fold(folds, task, HEADS: tl.constexpr, TILES: tl.constexpr):
    """Of one of the HEADS * TILES tasks of each fold its head and tile, src, dst, slot of the log and first entry."""
    fields = folds + 1 + task // (HEADS * TILES) * 4
    source, target, first = tl.load(fields), tl.load(fields + 1), tl.load(fields + 3)
    return task // TILES % HEADS, task % TILES, source, target, tl.load(fields + 2).to(tl.int64), first


@triton.jit
def wait_for_previous_launch():
    """A launch that may begin before the previous one is done reads nothing of it until then."""
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def next_launch_may_begin():
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def tile_rows(BLOCK_ROWS: tl.constexpr):
    """The rows of a tile, [8, BLOCK_ROWS / 8]: a warp has 8 at once, and a thread every eighth."""
    return tl.arange(0, 8)[:, None] + tl.arange(0, BLOCK_ROWS // 8)[None, :] * 8


@triton.jit
def tile_columns(BLOCK_COLUMNS: tl.constexpr):
    """The columns of a tile, [1, 1, BLOCK_COLUMNS / 16, 16].

    A thread has 4 neighbours of every 16: of the sum over a row two steps of five are left to be exchanged, and what a
    row is multiplied with serves all of a thread's rows.
    """
    column = tl.arange(0, BLOCK_COLUMNS // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    return column[None, None]


@triton.jit
def for_rows(place, columns, mask):
    """What each of the rows is multiplied with, [8, 1, BLOCK_COLUMNS / 16, 16]."""
    SHAPE: tl.constexpr = [8, 1, columns.shape[2], 16]
    return tl.load(tl.broadcast_to(place + columns, SHAPE), mask=mask, other=0)


@triton.jit
def window_scores(place):
    """[8, 1, 16]"""
    return tl.load(tl.broadcast_to(place + tl.arange(0, WINDOW)[None, None, :], [8, 1, WINDOW]))


@triton.jit
def window_values(log, first, at, value, STRIDE: tl.constexpr):
    """[8, rows / 8, 16] in fp32 from a log's entries, STRIDE elements apart; zeros outside the window."""
    entry = tl.arange(0, WINDOW)
    place = log + (entry * STRIDE)[None, None, :] + value[:, :, None]
    inside = (entry >= first) & (entry < at)
    return tl.load(place, mask=inside[None, None, :] & (value >= 0)[:, :, None], other=0).to(tl.float32)


@triton.jit
def fold_update(values, keys, acc):
    """acc + values [rows, 16] keys [16, columns], in fp32: bf16 keys are exact, values a sum of three parts."""
    if keys.dtype == tl.bfloat16:
        high = values.to(tl.bfloat16)
        rest = values - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return acc + tl.dot(high, keys, tl.dot(middle, keys, tl.dot(low, keys)))
    else:
        return dot(values, keys.to(tl.float32), acc)
