"""Decode a row of a convolution."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.structs import aggregate
from .tokens import load_input, output, slot_of, split_taps, store_output, store_window, token_of


@aggregate
class Rows:
    """Hold arrays of decode rows: see `StateIndices`."""

    src: tl.tensor
    lengths: tl.tensor
    dst: tl.tensor
    log_slot: tl.tensor
    log_start: tl.tensor
    log_end: tl.tensor
    ancestors: tl.tensor
    width: tl.tensor  # tokens of a row


@triton.jit
def _load_logged(log, entries, window, has_window, start, end, channel, in_dim, REACH: tl.constexpr):
    """Load REACH inputs before entry `end`, from the window before `start`."""
    history = ()
    for i in tl.static_range(REACH):
        entry = end - REACH + i
        logged = entry >= start
        place = tl.where(logged, token_of(log, entries, entry), token_of(log, window, entry - start + REACH))
        past = tl.load(place + channel, mask=tl.where(logged | has_window, in_dim, False), other=0)
        history = history + (past.to(tl.float32),)
    return history


@triton.jit
def decode_row(x, out, conv, state, log, rows, item, channel, in_dim):
    """Load in the order of use. A branch reads its path again."""
    REACH: tl.constexpr = conv.WIDTH - 1
    row = item * rows.width
    src, slot = tl.load(rows.src + item), tl.load(rows.log_slot + item)
    start, end = tl.load(rows.log_start + item), tl.load(rows.log_end + item)
    value = load_input(x, row, channel, in_dim)
    computed = tl.load(rows.lengths + item)
    dst = tl.load(rows.dst + item)
    window, entries = slot_of(state, src), slot_of(log, slot)
    history = _load_logged(log, entries, window, src != 0, start, end, channel, in_dim, REACH)
    taps = split_taps(conv)

    tl.debug_barrier()  # src may be dst
    for t in range(computed):
        inputs = history + (value.to(tl.float32),)
        tl.store(token_of(log, entries, end + t) + channel, value, mask=in_dim)
        further = tl.where(t + 1 < computed, in_dim, False)
        value = load_input(x, row + t + 1, channel, further)
        y = output(conv, inputs, taps)
        store_output(out, row + t, channel, y, in_dim)
        history = inputs[1:]
        path = tl.load(rows.ancestors + row + t + 1, mask=t + 1 < computed, other=-1)
        if (path >> t) & 1 == 0:
            history = _load_logged(log, entries, window, src != 0, start, end, channel, in_dim, REACH)
            for e in range(t):
                if (path >> e) & 1 == 1:
                    history = history[1:] + (load_input(x, row + e, channel, in_dim).to(tl.float32),)
    if (dst != 0) & (computed > 0):
        store_window(state, dst, history, channel, in_dim)
    zeros = tl.zeros(channel.shape, out.values.dtype.element_ty)
    for t in range(computed, rows.width):
        tl.store(out.values + (row + t) * out.stride + channel, zeros, mask=in_dim)
