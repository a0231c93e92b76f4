"""What decode over a token log shares: windows, on the host and in kernels.

A row's state S in memory stands at a fold, and its log holds what came after: an entry a token, in a ring. A window is
what lies between two folds, at most 16 entries. The state behind a window is total S + sum_i w_i u_i k_i^T, where w_i
is the product of the decays after entry i, and `total` that of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl

FOLD = 16  # folds stand at multiples of so many tokens, whatever a step's number of tokens
WINDOW = tl.constexpr(FOLD)


def capacity(tokens: int) -> int:
    """Entries of a ring for steps of so many tokens: a fold may be due one step after the drafts that reached it, and
    the entries that it takes are read while those of that step's tokens are written."""
    return FOLD + 2 * (tokens - 1)


@dataclass
class Cursor:
    """A row between two steps: its ring's first entry, how many it holds, and after how many it is folded."""

    room: int
    start: int = 0
    held: int = 0

    @property
    def due(self) -> bool:
        """Whether known tokens, those held and the next step's first, reach the fold: that step stores its state."""
        return self.held + 1 >= self.room

    def advance(self, accepted: int, size: int) -> None:
        """After a step of which so many tokens stay."""
        folded = self.room if self.due else 0
        self.held += accepted - folded
        self.start = (self.start + folded) % size
        self.room = FOLD if folded else self.room


def row_arrays(
    cursors: Sequence[Cursor], src: Sequence[int], lengths: Sequence[int], slots: Sequence[int], device: str
) -> dict[str, torch.Tensor]:
    """int32 [rows]; a state is folded in place, and only where a row runs."""
    due = zip(cursors, src, lengths, strict=True)
    columns: dict[str, Sequence[int]] = {
        "src": src,
        "dst": [block if cursor.due and length else 0 for cursor, block, length in due],
        "lengths": lengths,
        "slot": slots,
        "start": [cursor.start for cursor in cursors],
        "held": [cursor.held for cursor in cursors],
        "room": [cursor.room for cursor in cursors],
    }
    return {name: torch.tensor(column, dtype=torch.int32, device=device) for name, column in columns.items()}


def log_tensors(
    slots: int, entries: dict[str, tuple[tuple[int, ...], torch.dtype]], device: str
) -> dict[str, torch.Tensor]:
    """Tensors [slots, *shape] that share one slab a slot, as those of a state do; full of NaN."""
    offsets, end = {}, 0
    for name, (shape, dtype) in entries.items():
        offsets[name], end = end, end - prod(shape) * dtype.itemsize // -256 * 256
    slabs = torch.full((slots, end), 255, dtype=torch.uint8, device=device)
    return {
        name: slabs[:, offsets[name] : offsets[name] + prod(shape) * dtype.itemsize].view(dtype).unflatten(1, shape)
        for name, (shape, dtype) in entries.items()
    }


def slot_units(log: torch.Tensor) -> int:
    """From one slot to the next in units of 16 bytes."""
    return log.stride(0) * log.element_size() // 16


@triton.jit
def _times(x, y):
    return x * y


@triton.jit
def weights_of(following, first):
    """w_i [16, parts] of every entry and `total` [parts]: `following` has at i the decay of entry i + 1 (1 where there
    is none), `first` that of entry 0; a part is what has a decay of its own."""
    weights = tl.associative_scan(following, 0, _times, reverse=True)
    return weights, first * tl.sum(tl.where(tl.arange(0, WINDOW)[:, None] == 0, weights, 0), axis=0)


@triton.jit
def window_of(held, room, start):
    """Of a row whose log holds `held` tokens, the window that its next token joins: its first entry's place in the
    ring, how many it has, and after how many it is folded."""
    folded = held >= room
    first = tl.where(folded, start + room, start)
    return first, tl.where(folded, held - room, held), tl.where(folded, WINDOW, room)


@triton.jit
def slot_of(log, slot, stride):
    """A row's slot of one tensor of the log; `stride` counts 16 bytes."""
    return log + slot * (tl.cast(stride, tl.int64) * (128 // log.dtype.element_ty.primitive_bitwidth))
