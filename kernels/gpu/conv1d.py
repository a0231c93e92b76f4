"""Causal depthwise convolution over a mixed batch, in one Triton launch."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ..indices import StateIndices
from .common.chunks import CHUNK
from .common.launch import Launcher, index_pointers
from .common.layout import check_dense, stride_alignment

BLOCK_D = 1024  # channels of a program of four warps: 16 bytes a lane in 16-bit dtypes
UNROLL = 4  # tokens of a chunk that a program loads at once, at least the width minus one
STAGES = 3  # the loads of two more such groups are under way
ARRAYS = (
    "decode_src",
    "decode_len",
    "decode_dst",
    "log_slot",
    "log_start",
    "log_end",
    "ancestors",
    "query_start_loc",
    "context_len",
    "src",
    "chunk_seq",
    "chunk_start",
    "chunk_dst",
    "seq_chunk_start",
)


@triton.jit
def _split_taps(tile, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """The WIDTH columns of a tile [BLOCK_D, 4], in fp32."""
    even, odd = tl.split(tl.reshape(tile.to(tl.float32), [BLOCK_D, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    taps = (first, second, third, fourth)
    return taps[:WIDTH]


@triton.jit
def _load_input(source, t, channel, mask, ALIGNMENT: tl.constexpr):
    """The convolution's input at token t: x, or x times its gate, rounded as the window will hold it."""
    x, x_stride, gate, gate_stride = source
    value = tl.load(x + tl.multiple_of(t * x_stride, ALIGNMENT) + channel, mask=mask)
    if gate is not None:
        opened = tl.load(gate + tl.multiple_of(t * gate_stride, ALIGNMENT) + channel, mask=mask)
        value = (value.to(tl.float32) * opened.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _store_output(target, t, channel, y, mask, ALIGNMENT: tl.constexpr):
    """Stores the output of token t, times its gate if there is one; both are rounded, as by two modules."""
    out, out_stride, gate, gate_stride = target
    y = y.to(out.dtype.element_ty)
    if gate is not None:
        opened = tl.load(gate + tl.multiple_of(t * gate_stride, ALIGNMENT) + channel, mask=mask)
        y = (y.to(tl.float32) * opened.to(tl.float32)).to(y.dtype)
    tl.store(out + t * out_stride + channel, y, mask=mask)


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
    """The REACH inputs before token `first`, in fp32. Those before `row`, its row's first token, are in the window."""
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
def _output(inputs, taps, bias, WIDTH: tl.constexpr, SILU: tl.constexpr):
    """The output of one token from the last WIDTH inputs, oldest first."""
    total = bias
    for i in tl.static_range(WIDTH):
        total += taps[i] * inputs[i]
    if SILU:
        total = total / (1 + tl.exp(-total))
    return total


@triton.jit
def _store_window(slot, history, mask, DIM: tl.constexpr):
    for i in tl.static_range(len(history)):
        tl.store(slot + i * DIM, history[i].to(slot.dtype.element_ty), mask=mask)


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
    """The REACH inputs before entry `end` of a log, in fp32. Those before its entry `start` are in the window."""
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
def _decode_row(
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
    """Loads come first and in the order of their use, since each is waited for where it is used.

    Where a token does not follow on the one before it, the inputs of its path are read again."""
    REACH: tl.constexpr = WIDTH - 1
    row = item * tokens_per_decode
    src, slot = tl.load(decode_src + item), tl.load(log_slot + item)
    start, end = tl.load(log_start + item), tl.load(log_end + item)
    value = _load_input(source, row, channel, in_dim, ALIGNMENT)
    computed = tl.load(decode_len + item)  # the row's other tokens are padding
    dst = tl.load(decode_dst + item)
    window = state + tl.multiple_of(src * state_stride, STATE_ALIGNMENT)
    log += tl.multiple_of(slot * log_stride, STATE_ALIGNMENT)
    history = _load_logged(window, src != 0, log, start, end, channel, in_dim, DIM, REACH, STATE_ALIGNMENT)
    taps = _split_taps(tap_tile, WIDTH, BLOCK_D)

    out, out_stride, _, _ = target
    tl.debug_barrier()  # src may be dst: it has been read by all threads from here on
    for t in range(computed):
        inputs = history + (value.to(tl.float32),)
        tl.store(log + tl.multiple_of((end + t) * DIM, STATE_ALIGNMENT) + channel, value, mask=in_dim)
        further = tl.where(t + 1 < computed, in_dim, False)
        value = _load_input(source, row + t + 1, channel, further, ALIGNMENT)
        y = _output(inputs, taps, bias, WIDTH, SILU)
        _store_output(target, row + t, channel, y, in_dim, ALIGNMENT)
        history = inputs[1:]
        path = tl.load(ancestors + row + t + 1, mask=t + 1 < computed, other=-1)
        if (path >> t) & 1 == 0:
            history = _load_logged(window, src != 0, log, start, end, channel, in_dim, DIM, REACH, STATE_ALIGNMENT)
            for e in range(t):
                if (path >> e) & 1 == 1:
                    history = history[1:] + (_load_input(source, row + e, channel, in_dim, ALIGNMENT).to(tl.float32),)
    if (dst != 0) & (computed > 0):
        _store_window(state + tl.multiple_of(dst * state_stride, STATE_ALIGNMENT) + channel, history, in_dim, DIM)
    zeros = tl.zeros([BLOCK_D], out.dtype.element_ty)
    for t in range(computed, tokens_per_decode):
        tl.store(out + (row + t) * out_stride + channel, zeros, mask=in_dim)


@triton.jit
def _prefill_chunk(
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
    taps = _split_taps(tap_tile, WIDTH, BLOCK_D)
    whole = first + (end - first) // UNROLL * UNROLL
    for start in tl.range(first, whole, UNROLL, num_stages=STAGES):
        inputs = history
        for i in tl.static_range(UNROLL):
            value = _load_input(source, start + i, channel, in_dim, ALIGNMENT)
            inputs = inputs + (value.to(tl.float32),)
        for i in tl.static_range(UNROLL):
            y = _output(inputs[i : i + WIDTH], taps, bias, WIDTH, SILU)
            _store_output(target, start + i, channel, y, in_dim, ALIGNMENT)
        history = inputs[UNROLL:]
    for t in range(whole, end):
        value = _load_input(source, t, channel, in_dim, ALIGNMENT)
        inputs = history + (value.to(tl.float32),)
        y = _output(inputs, taps, bias, WIDTH, SILU)
        _store_output(target, t, channel, y, in_dim, ALIGNMENT)
        history = inputs[1:]
    if dst != 0:
        slot = state + tl.multiple_of(dst * state_stride, STATE_ALIGNMENT) + channel
        _store_window(slot, history, in_dim, DIM)


@triton.jit(
    do_not_specialize=[
        "num_decodes",
        "tokens_per_decode",
        "num_prefills",
        "num_tokens",
        "x_stride",
        "input_gate_stride",
        "output_gate_stride",
        "state_stride",
        "log_stride",
    ]
)
def _conv1d_kernel(
    x,
    input_gate,
    output_gate,
    weight,
    bias,
    out,
    state,
    log,
    decode_src,
    decode_len,
    decode_dst,
    log_slot,
    log_start,
    log_end,
    ancestors,
    query_start_loc,
    context_len,
    src,
    chunk_seq,
    chunk_start,
    chunk_dst,
    seq_chunk_start,
    num_decodes,
    tokens_per_decode,
    num_prefills,
    num_tokens,
    x_stride,
    input_gate_stride,
    output_gate_stride,
    state_stride,
    log_stride,
    OUT_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PREFILL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes one tile of channels of one decode row or of one chunk, and walks through its tokens."""
    TILES: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    item = tl.program_id(0) // TILES
    channel = tl.program_id(0) % TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    in_dim = channel < DIM
    state_stride = tl.cast(state_stride, tl.int64)
    out_stride = tl.cast(OUT_STRIDE, tl.int64)
    source = (x, tl.cast(x_stride, tl.int64), input_gate, tl.cast(input_gate_stride, tl.int64))
    target = (out, out_stride, output_gate, tl.cast(output_gate_stride, tl.int64))
    tap = tl.arange(0, 4)
    tap_tile = weight + channel[:, None] * CHANNEL_STRIDE + tap[None, :] * TAP_STRIDE
    tap_tile = tl.load(tap_tile, mask=in_dim[:, None] & (tap < WIDTH)[None, :], other=0)
    zeros = tl.zeros([BLOCK_D], tl.float32)
    bias = tl.load(bias + channel, mask=in_dim, other=0).to(tl.float32) if HAS_BIAS else zeros
    tail = tl.load(query_start_loc + num_prefills)  # tokens from here on belong to no row
    if item < num_decodes:
        if log is not None:
            _decode_row(
                source,
                target,
                tap_tile,
                bias,
                state,
                state_stride,
                log,
                tl.cast(log_stride, tl.int64),
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
                DIM,
                WIDTH,
                ALIGNMENT,
                STATE_ALIGNMENT,
                SILU,
                BLOCK_D,
            )
    elif PREFILL:
        chunk = item - num_decodes
        if chunk < tl.load(seq_chunk_start + num_prefills):
            _prefill_chunk(
                source,
                target,
                tap_tile,
                bias,
                state,
                state_stride,
                query_start_loc,
                context_len,
                src,
                chunk_seq,
                chunk_start,
                chunk_dst,
                chunk,
                channel,
                in_dim,
                DIM,
                WIDTH,
                ALIGNMENT,
                STATE_ALIGNMENT,
                SILU,
                BLOCK_D,
                UNROLL,
                STAGES,
            )
    for t in range(tail + item, num_tokens, tl.num_programs(0) // TILES):
        tl.store(out + t * out_stride + channel, zeros.to(out.dtype.element_ty), mask=in_dim)


_launch = Launcher(_conv1d_kernel)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    log: Tensor | None,
    indices: StateIndices,
    activation: str | None = "silu",
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `mambacache.kernels.conv1d`. The channels of x and its gates are dense; all other strides are free."""
    check_dense(x=x, bias=bias, input_gate=input_gate, output_gate=output_gate)
    num_tokens, dim = x.shape
    out = x.new_empty(num_tokens, dim) if out is None else out
    items = indices.num_decodes + indices.chunk_seq.shape[0]
    channel_stride, tap_stride = weight.stride()
    per_token = [x if tensor is None else tensor for tensor in (x, input_gate, output_gate)]
    _launch(
        -(-dim // BLOCK_D) * max(items, 1),
        (x, input_gate, output_gate, weight, bias, out, state, log),
        index_pointers(indices, ARRAYS),
        (
            indices.num_decodes,
            indices.tokens_per_decode,
            indices.num_prefills,
            num_tokens,
            *(tensor.stride(0) for tensor in per_token),
            state.stride(0),
            0 if log is None else log.stride(0),
        ),
        {
            "OUT_STRIDE": out.stride(0),
            "DIM": dim,
            "WIDTH": weight.shape[1],
            "TAP_STRIDE": tap_stride,
            "CHANNEL_STRIDE": channel_stride,
            "ALIGNMENT": min(map(stride_alignment, per_token)),
            "STATE_ALIGNMENT": math.gcd(16 // state.element_size(), dim),
            "HAS_BIAS": bias is not None,
            "SILU": activation == "silu",
            "PREFILL": indices.num_prefills > 0,
            "BLOCK_D": BLOCK_D,
            "UNROLL": UNROLL,
            "STAGES": STAGES,
        },
        num_warps=4,
    )
    return out
