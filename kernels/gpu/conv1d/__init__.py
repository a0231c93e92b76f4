"""Implement `conv1d`."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.launch import Launcher, index_pointers
from ..common.layout import check_dense, stride_alignment
from .decode import Rows, decode_row
from .prefill import Chunks, prefill_chunk
from .tokens import Filter, Slots, Tokens

BLOCK_D = 1024  # channels per program
UNROLL = 4  # tokens loaded at once, at least WIDTH - 1
STAGES = 3
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
    """Walk a tile of channels through a decode row or chunk."""
    TILES: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    item = tl.program_id(0) // TILES
    channel = tl.program_id(0) % TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    in_dim = channel < DIM
    windows = Slots(state, tl.cast(state_stride, tl.int64), DIM, STATE_ALIGNMENT)
    source = Tokens(x, tl.cast(x_stride, tl.int64), input_gate, tl.cast(input_gate_stride, tl.int64), ALIGNMENT)
    target = Tokens(out, tl.cast(OUT_STRIDE, tl.int64), output_gate, tl.cast(output_gate_stride, tl.int64), ALIGNMENT)
    tap = tl.arange(0, 4)
    taps = weight + channel[:, None] * CHANNEL_STRIDE + tap[None, :] * TAP_STRIDE
    taps = tl.load(taps, mask=in_dim[:, None] & (tap < WIDTH)[None, :], other=0)
    zeros = tl.zeros([BLOCK_D], tl.float32)
    bias = tl.load(bias + channel, mask=in_dim, other=0).to(tl.float32) if HAS_BIAS else zeros
    conv = Filter(taps, bias, WIDTH, SILU)
    tail = tl.load(query_start_loc + num_prefills)  # padding follows
    if item < num_decodes:
        if log is not None:
            entries = Slots(log, tl.cast(log_stride, tl.int64), DIM, STATE_ALIGNMENT)
            rows = Rows(
                decode_src, decode_len, decode_dst, log_slot, log_start, log_end, ancestors, tokens_per_decode
            )  # fmt: skip
            decode_row(source, target, conv, windows, entries, rows, item, channel, in_dim)
    elif PREFILL:
        chunk = item - num_decodes
        if chunk < tl.load(seq_chunk_start + num_prefills):
            chunks = Chunks(query_start_loc, context_len, src, chunk_seq, chunk_start, chunk_dst)
            prefill_chunk(source, target, conv, windows, chunks, chunk, channel, in_dim, UNROLL, STAGES)
    for t in range(tail + item, num_tokens, tl.num_programs(0) // TILES):
        tl.store(out + t * target.stride + channel, zeros.to(out.dtype.element_ty), mask=in_dim)


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
    """See `mambacache.kernels.conv1d`. Channels of x and its gates must be dense."""
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
