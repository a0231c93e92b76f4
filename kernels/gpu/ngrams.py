"""Implement the ops of drafts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mambacache.plan import MAX_TOKENS_PER_DECODE

from ..indices import StateIndices
from ..reference.ngrams import LONGEST, OPEN, SHORTEST
from .common.launch import Launcher, index_pointers

ROWS = 1024  # counted at once
TILE = 4096  # tokens searched at once
DRAFT_ARRAYS = "tokens", "positions", "log_slot", "decode_len", "late_len"
ADD_ARRAYS = "tokens", "log_slot", "decode_len"


@triton.jit(do_not_specialize=["tokens_per_decode", "num_rows", "room"])
def _draft_kernel(
    histories,
    lengths,
    out,
    tokens,
    positions,
    slots,
    decode_len,
    late_len,
    tokens_per_decode,
    num_rows,
    room,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    OPEN: tl.constexpr,
):
    """Take the match with the highest key: 4 L width + (2 L + place if enough tokens follow, else L - place).

    `width` is the match's length, L the history's.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    last = tl.load(lengths + slot).to(tl.int32) - 1
    history, own = histories + slot * room, tokens + row * tokens_per_decode
    late = tl.load(late_len + row) > 0
    if late:
        tl.store(own, tl.load(history + last))
    samples = 0
    for first in range(0, row, ROWS):
        other = first + tl.arange(0, ROWS)
        mask = other < row
        length = tl.load(decode_len + other, mask=mask, other=0)
        samples += tl.sum(tl.maximum(length, tl.load(late_len + other, mask=mask, other=0)), axis=0)
    by = tl.where(late, last - tl.load(positions + row * tokens_per_decode), 0)
    tl.store(out + row, last)
    tl.store(out + num_rows + row, by)
    tl.store(out + 2 * num_rows + row, samples)

    count = tokens_per_decode - 1
    lane = tl.arange(0, LANES)
    is_open = tl.load(own + 1 + lane, mask=lane < count, other=0) == OPEN
    if tl.max(is_open.to(tl.int32), axis=0) > 0:
        length, best = last + 1, 0
        first = last // TILE * TILE
        while (first >= 0) & (best < (4 * LONGEST + 2) * length):  # earlier places have lower keys
            place = first + tl.arange(0, TILE)
            match = place < last
            width = tl.zeros([TILE], tl.int32)
            for back in tl.static_range(LONGEST):
                token = tl.load(history + tl.maximum(last - back, 0))
                match &= place >= back
                match &= tl.load(history + place - back, mask=match, other=-1) == token
                width += match.to(tl.int32)
            key = width * 4 * length + tl.where(place + count <= last, 2 * length + place, length - place)
            best = tl.maximum(best, tl.max(tl.where(width < SHORTEST, 0, key), axis=0))
            first -= TILE
        rest = best % (4 * length)
        found = tl.where(rest >= 2 * length, rest - 2 * length, length - rest)
        following = found + 1 + lane
        real = following <= tl.where(best > 0, last, -1)
        tl.store(own + 1 + lane, tl.load(history + following, mask=real, other=0), mask=is_open)


@triton.jit(do_not_specialize=["tokens_per_decode", "num_samples", "room"])
def _add_kernel(
    histories,
    lengths,
    first_sample,
    sampled,
    counts,
    tokens,
    slots,
    decode_len,
    tokens_per_decode,
    num_samples,
    room,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    slot = tl.load(slots + row).to(tl.int64)
    place = tl.minimum(tl.load(first_sample + row) + lane, num_samples - 1)
    given = tl.maximum(tl.load(sampled + place), 0).to(tl.int32)
    drafted = 1 + lane < tl.load(decode_len + row)
    draft = tl.load(tokens + row * tokens_per_decode + 1 + lane, mask=drafted, other=0)
    count = 1 + tl.min(tl.where(drafted & (draft == given), LANES, lane), axis=0)
    tl.store(counts + row, count)
    if slot > 0:
        length = tl.load(lengths + slot)
        tl.store(histories + slot * room + length + lane, given, mask=lane < tokens_per_decode)
        tl.store(lengths + slot, length + count)


_draft = Launcher(_draft_kernel)
_add = Launcher(_add_kernel)


def draft_from_history(indices: StateIndices, histories: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `mambacache.kernels.draft_from_history`."""
    out = torch.empty(3, indices.num_decodes, dtype=torch.int64, device=histories.device)
    if indices.num_decodes:
        _draft(
            indices.num_decodes,
            (histories, lengths, out),
            index_pointers(indices, DRAFT_ARRAYS),
            (indices.tokens_per_decode, indices.num_decodes, histories.stride(0)),
            {
                "ROWS": ROWS,
                "TILE": TILE,
                "LANES": MAX_TOKENS_PER_DECODE,
                "SHORTEST": SHORTEST,
                "LONGEST": LONGEST,
                "OPEN": OPEN,
            },
            num_warps=8,
        )
    starts, late, first_sample = out
    return starts, late, first_sample


def add_to_history(
    indices: StateIndices, first_sample: Tensor, sampled: Tensor, histories: Tensor, lengths: Tensor
) -> Tensor:
    """See `mambacache.kernels.add_to_history`."""
    counts = torch.empty_like(first_sample)
    if len(counts):
        _add(
            len(counts),
            (histories, lengths, first_sample, sampled, counts),
            index_pointers(indices, ADD_ARRAYS),
            (indices.tokens_per_decode, len(sampled), histories.stride(0)),
            {"LANES": MAX_TOKENS_PER_DECODE},
            num_warps=1,
        )
    return counts
