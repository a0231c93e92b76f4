"""Decode a row of a convolution."""

from __future__ import annotations

import triton
import triton.language as tl

from .tokens import load_input, output, split_taps, store_output, store_window


@triton.jit
def _load_logged(
    window,
    has_window,
    log,
    start,
    end,
    channel,
    in_dim,
    DIM: tl.constexpr,
    REACH: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr,
):
    """Load REACH inputs before entry `end`, from the window before `start`."""
    history = ()
    for i in tl.static_range(REACH):
        entry = end - REACH + i
        logged = entry >= start
        place = tl.where(
            logged,
            log + tl.multiple_of(entry * DIM, STATE_ALIGNMENT),
            window + tl.multiple_of((entry - start + REACH) * DIM, STATE_ALIGNMENT),
        )
        past = tl.load(place + channel, mask=tl.where(logged | has_window, in_dim, False), other=0)
        history = history + (past.to(tl.float32),)
    return history


@triton.jit
def decode_row(
    source,
    target,
    tap_tile,
    bias,
    state,
    state_stride,
    log,
    log_stride,
    decode_src,
    decode_len,
    decode_dst,
    log_slot,
    log_start,
    log_end,
    ancestors,
    item,
    tokens_per_decode,
    channel,
    in_dim,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load in the order of use. A branch reads its path again."""
    REACH: tl.constexpr = WIDTH - 1
    row = item * tokens_per_decode
    src, slot = tl.load(decode_src + item), tl.load(log_slot + item)
    start, end = tl.load(log_start + item), tl.load(log_end + item)
    value = load_input(source, row, channel, in_dim, ALIGNMENT)
    computed = tl.load(decode_len + item)
    dst = tl.load(decode_dst + item)
    window = state + tl.multiple_of(src * state_stride, STATE_ALIGNMENT)
    log += tl.multiple_of(slot * log_stride, STATE_ALIGNMENT)
    history = _load_logged(window, src != 0, log, start, end, channel, in_dim, DIM, REACH, STATE_ALIGNMENT)
    taps = split_taps(tap_tile, WIDTH, BLOCK_D)

    out, out_stride, _, _ = target
    tl.debug_barrier()  # src may be dst
    for t in range(computed):
        inputs = history + (value.to(tl.float32),)
        tl.store(log + tl.multiple_of((end + t) * DIM, STATE_ALIGNMENT) + channel, value, mask=in_dim)
        further = tl.where(t + 1 < computed, in_dim, False)
        value = load_input(source, row + t + 1, channel, further, ALIGNMENT)
        y = output(inputs, taps, bias, WIDTH, SILU)
        store_output(target, row + t, channel, y, in_dim, ALIGNMENT)
        history = inputs[1:]
        path = tl.load(ancestors + row + t + 1, mask=t + 1 < computed, other=-1)
        if (path >> t) & 1 == 0:
            history = _load_logged(window, src != 0, log, start, end, channel, in_dim, DIM, REACH, STATE_ALIGNMENT)
            for e in range(t):
                if (path >> e) & 1 == 1:
                    history = history[1:] + (load_input(source, row + e, channel, in_dim, ALIGNMENT).to(tl.float32),)
    if (dst != 0) & (computed > 0):
        store_window(state + tl.multiple_of(dst * state_stride, STATE_ALIGNMENT) + channel, history, in_dim, DIM)
    zeros = tl.zeros([BLOCK_D], out.dtype.element_ty)
    for t in range(computed, tokens_per_decode):
        tl.store(out + (row + t) * out_stride + channel, zeros, mask=in_dim)
