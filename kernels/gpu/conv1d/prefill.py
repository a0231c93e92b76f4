"""Prefill a chunk of a convolution."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.chunks import CHUNK
from ..common.structs import aggregate
from .tokens import load_input, output, slot_of, split_taps, store_output, store_window, token_of


@aggregate
class Chunks:
    """Hold arrays of prefill rows and their chunks: see `StateIndices`."""

    query_start_loc: tl.tensor
    context_len: tl.tensor
    src: tl.tensor
    seq: tl.tensor
    start: tl.tensor
    dst: tl.tensor


@triton.jit
def _load_history(x, state, window, has_window, row, first, channel, in_dim, REACH: tl.constexpr):
    """Load REACH inputs before token `first`, from the window before `row`."""
    history = ()
    for i in tl.static_range(REACH):
        t = first - REACH + i
        place = tl.where(
            t < row,
            token_of(state, window, t - row + REACH),
            x.values + tl.multiple_of(t * x.stride, x.ALIGNMENT),
        )
        value = tl.load(place + channel, mask=tl.where(has_window | (t >= row), in_dim, False), other=0)
        if x.gate is not None:
            place = x.gate + tl.multiple_of(t * x.gate_stride, x.ALIGNMENT) + channel
            opened = tl.load(place, mask=tl.where(t >= row, in_dim, False), other=1)
            value = (value.to(tl.float32) * opened.to(tl.float32)).to(value.dtype)
        history = history + (value.to(tl.float32),)
    return history


@triton.jit
def prefill_chunk(x, out, conv, state, chunks, chunk, channel, in_dim, UNROLL: tl.constexpr, STAGES: tl.constexpr):
    seq = tl.load(chunks.seq + chunk)
    first = tl.load(chunks.start + chunk)
    dst = tl.load(chunks.dst + chunk)
    src = tl.load(chunks.src + seq)
    row = tl.load(chunks.query_start_loc + seq)
    row_end = tl.load(chunks.query_start_loc + seq + 1)
    position = tl.load(chunks.context_len + seq) + first - row
    end = tl.minimum(first + CHUNK - position % CHUNK, row_end)
    window = slot_of(state, src)
    history = _load_history(x, state, window, src != 0, row, first, channel, in_dim, conv.WIDTH - 1)
    taps = split_taps(conv)
    whole = first + (end - first) // UNROLL * UNROLL
    for start in tl.range(first, whole, UNROLL, num_stages=STAGES):
        inputs = history
        for i in tl.static_range(UNROLL):
            inputs = inputs + (load_input(x, start + i, channel, in_dim).to(tl.float32),)
        for i in tl.static_range(UNROLL):
            y = output(conv, inputs[i : i + conv.WIDTH], taps)
            store_output(out, start + i, channel, y, in_dim)
        history = inputs[UNROLL:]
    for t in range(whole, end):
        inputs = history + (load_input(x, t, channel, in_dim).to(tl.float32),)
        store_output(out, t, channel, output(conv, inputs, taps), in_dim)
        history = inputs[1:]
    if dst != 0:
        store_window(state, dst, history, channel, in_dim)
