"""Prefill a chunk of a convolution."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.chunks import CHUNK
from .tokens import load_input, output, split_taps, store_output, store_window


@triton.jit
def _load_history(
    source,
    window,
    has_window,
    row,
    first,
    channel,
    in_dim,
    DIM: tl.constexpr,
    REACH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr,
):
    """Load REACH inputs before token `first`, from the window before `row`."""
    x, x_stride, gate, gate_stride = source
    history = ()
    for i in tl.static_range(REACH):
        t = first - REACH + i
        place = tl.where(
            t < row,
            window + tl.multiple_of((t - row + REACH) * DIM, STATE_ALIGNMENT),
            x + tl.multiple_of(t * x_stride, ALIGNMENT),
        )
        value = tl.load(place + channel, mask=tl.where(has_window | (t >= row), in_dim, False), other=0)
        if gate is not None:
            place = gate + tl.multiple_of(t * gate_stride, ALIGNMENT) + channel
            opened = tl.load(place, mask=tl.where(t >= row, in_dim, False), other=1)
            value = (value.to(tl.float32) * opened.to(tl.float32)).to(value.dtype)
        history = history + (value.to(tl.float32),)
    return history


@triton.jit
def prefill_chunk(
    source,
    target,
    tap_tile,
    bias,
    state,
    state_stride,
    query_start_loc,
    context_len,
    seq_src,
    chunk_seq,
    chunk_start,
    chunk_dst,
    chunk,
    channel,
    in_dim,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):
    REACH: tl.constexpr = WIDTH - 1
    seq = tl.load(chunk_seq + chunk)
    first = tl.load(chunk_start + chunk)
    dst = tl.load(chunk_dst + chunk)
    src = tl.load(seq_src + seq)
    row = tl.load(query_start_loc + seq)
    row_end = tl.load(query_start_loc + seq + 1)
    position = tl.load(context_len + seq) + first - row
    end = tl.minimum(first + CHUNK - position % CHUNK, row_end)
    window = state + tl.multiple_of(src * state_stride, STATE_ALIGNMENT)
    history = _load_history(
        source, window, src != 0, row, first, channel, in_dim, DIM, REACH, ALIGNMENT, STATE_ALIGNMENT
    )
    taps = split_taps(tap_tile, WIDTH, BLOCK_D)
    whole = first + (end - first) // UNROLL * UNROLL
    for start in tl.range(first, whole, UNROLL, num_stages=STAGES):
        inputs = history
        for i in tl.static_range(UNROLL):
            value = load_input(source, start + i, channel, in_dim, ALIGNMENT)
            inputs = inputs + (value.to(tl.float32),)
        for i in tl.static_range(UNROLL):
            y = output(inputs[i : i + WIDTH], taps, bias, WIDTH, SILU)
            store_output(target, start + i, channel, y, in_dim, ALIGNMENT)
        history = inputs[UNROLL:]
    for t in range(whole, end):
        value = load_input(source, t, channel, in_dim, ALIGNMENT)
        inputs = history + (value.to(tl.float32),)
        y = output(inputs, taps, bias, WIDTH, SILU)
        store_output(target, t, channel, y, in_dim, ALIGNMENT)
        history = inputs[1:]
    if dst != 0:
        slot = state + tl.multiple_of(dst * state_stride, STATE_ALIGNMENT) + channel
        store_window(slot, history, in_dim, DIM)
