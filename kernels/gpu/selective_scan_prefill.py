"""Selective scan over the prefill rows of a batch, in one Triton launch.

Token by token, with the states in registers, so that no cut of a sequence shows in them. Sums and products are spelled
out (`fma`), for every kernel and every tile to round alike.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..indices import StateIndices
from .chunks import CHUNK
from .decays import LOG2_E
from .launch import Launcher
from .layout import layer_strides, slot_elements, slot_stride
from .selective_scan_math import floats, load_row, silu, split_four, step_size, store_states

WARPS = 4
# Of 16 states: lanes that share a channel, tokens of a group, and whether a group is loaded while the one before it is
# scanned: where a sequence takes as long as its chain of tokens, and where other warps fill the gaps.
FEW, MANY = (2, 8, True), (1, 4, False)
MANY_WARPS = 1056  # of 16 channels: two for every scheduler of an H100 or H200


@triton.jit
def _load_tokens(
    inputs,
    t,
    start,
    end,
    channel,
    n,
    STRIDES: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    COUNT: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """x, dt and z of COUNT tokens from t on, a token a lane, and their rows of B and C.

    Unless all of them are WHOLE, others of the row stand in for those before its start and from its end on.
    """
    x, dt, z, B, C = inputs
    wide = tl.cast(t, tl.int64)
    lane = tl.arange(0, LANES)[None, :, None, None, None]
    loaded = ()
    for i in tl.static_range(0, COUNT, LANES):
        offset = i + lane if WHOLE else tl.minimum(tl.maximum(t + i + lane, start), end - 1) - t
        tiles = (tl.load(x + wide * STRIDES[0] + (offset * STRIDES[0] + channel)),)
        tiles = tiles + (tl.load(dt + wide * STRIDES[1] + (offset * STRIDES[1] + channel)),)
        if z is not None:
            tiles = tiles + (tl.load(z + wide * STRIDES[2] + (offset * STRIDES[2] + channel)),)
        rows = ()
        for j in tl.static_range(LANES):
            offset = i + j if WHOLE else tl.minimum(tl.maximum(t + i + j, start), end - 1) - t
            b = load_row(B + wide * STRIDES[3] + offset * STRIDES[3], n, N, BLOCK_N, PACKED)
            c = load_row(C + wide * STRIDES[4] + offset * STRIDES[4], n, N, BLOCK_N, PACKED)
            rows = rows + ((b, c),)
        loaded = loaded + ((tiles, rows),)
    return loaded


@triton.jit
def _scan_tokens(
    S,
    loaded,
    weights,
    out,
    t,
    start,
    end,
    channel,
    in_dim,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    COUNT: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Takes the states through COUNT tokens from t on and stores their outputs. A lane knows one token's step and gate.

    The tokens before the row's start and from its end on change nothing.
    """
    DTYPE: tl.constexpr = out.dtype.element_ty
    rates, skip, bias = weights
    lane = tl.arange(0, LANES)[None, :, None, None, None]
    for i in tl.static_range(0, COUNT, LANES):
        tiles, rows = loaded[i // LANES]
        x = tiles[0].to(tl.float32)
        step = step_size(tiles[1].to(tl.float32), bias)
        stored = in_dim
        if not WHOLE:
            valid = (t + i + lane >= start) & (t + i + lane < end)
            step = tl.where(valid, step, 0.0)
            stored = valid & in_dim
        y = tl.zeros_like(step)
        for j in tl.static_range(LANES):
            d, u = step, step * x
            if LANES > 1:
                d = tl.sum(tl.where(lane == j, d, 0.0), axis=1, keep_dims=True)
                u = tl.sum(tl.where(lane == j, u, 0.0), axis=1, keep_dims=True)
            b, c = floats(rows[j][0], DTYPE, PACKED), floats(rows[j][1], DTYPE, PACKED)
            s0 = tl.fma(tl.exp2(d * rates[0]), S[0], u * b[0])
            s1 = tl.fma(tl.exp2(d * rates[1]), S[1], u * b[1])
            s2 = tl.fma(tl.exp2(d * rates[2]), S[2], u * b[2])
            s3 = tl.fma(tl.exp2(d * rates[3]), S[3], u * b[3])
            S = (s0, s1, s2, s3)
            read = tl.fma(s3, c[3], tl.fma(s2, c[2], tl.fma(s1, c[1], s0 * c[0])))
            read = tl.sum(tl.sum(read, axis=4, keep_dims=True), axis=3, keep_dims=True)
            y = tl.where(lane == j, tl.sum(read, axis=1, keep_dims=True), y)
        y = tl.fma(skip, x, y)
        if len(tiles) == 3:
            y = y * silu(tiles[2].to(tl.float32))
        place = out + tl.cast(t, tl.int64) * DIM + ((i + lane) * DIM + channel)
        tl.store(place, y.to(DTYPE), mask=stored)
    return S


@triton.jit
def _end_chunk(S, target, chunk_dst, chunk, t, start, origin):
    """The states before token t: where `chunk` ended there, rounded as stored, and stored if its dst says so."""
    STATE: tl.constexpr = target[0].dtype.element_ty
    boundary = (t - origin) % CHUNK == 0
    if STATE != tl.float32:
        s0 = tl.where(boundary, S[0].to(STATE).to(tl.float32), S[0])
        s1 = tl.where(boundary, S[1].to(STATE).to(tl.float32), S[1])
        s2 = tl.where(boundary, S[2].to(STATE).to(tl.float32), S[2])
        s3 = tl.where(boundary, S[3].to(STATE).to(tl.float32), S[3])
        S = (s0, s1, s2, s3)
    if boundary & (t > start):
        store_states(S, target, tl.load(chunk_dst + chunk))
    return S


@triton.jit(do_not_specialize=["slot_stride", "num_prefills", "num_tokens"])
def _scan_kernel(
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    state,
    out,
    query_start_loc,
    context_len,
    src,
    chunk_dst,
    seq_chunk_start,
    longest_first,
    slot_stride,
    num_prefills,
    num_tokens,
    STRIDES: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program carries the states of some channels through one sequence.

    Tiles are [channels of a warp, lanes of a channel, warps, halves, parts]. A channel's states are PARTS times
    LANES times one or two halves times four, and a thread has those of its lane: so their sum is the same, whether the
    last half of them is in the same lane or in others.
    """
    CHANNELS: tl.constexpr = 32 // LANES
    HALVES: tl.constexpr = BLOCK_N // (4 * PARTS * LANES)
    lane = tl.arange(0, LANES)[None, :, None, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None, None]
    half = tl.arange(0, HALVES)[None, None, None, :, None]
    part = tl.arange(0, PARTS)[None, None, None, None, :]
    channel = tl.program_id(0) * (CHANNELS * WARPS) + warp * CHANNELS
    channel = channel + tl.arange(0, CHANNELS)[:, None, None, None, None]
    in_dim = channel < DIM
    n = ((part * HALVES + half) * LANES + lane) * 4

    if tl.program_id(1) == num_prefills:  # tokens that belong to no row
        for t in range(tl.load(query_start_loc + num_prefills), num_tokens):
            zeros = tl.zeros([CHANNELS, 1, WARPS, 1, 1], out.dtype.element_ty)
            tl.store(out + tl.cast(t, tl.int64) * DIM + channel, zeros, mask=in_dim)
        return

    seq = tl.load(longest_first + tl.program_id(1))
    start = tl.load(query_start_loc + seq)
    end = tl.load(query_start_loc + seq + 1)
    if start == end:
        return
    context = tl.load(context_len + seq)
    fourth = tl.arange(0, 4)[None, None, None, None, None, :]
    element = tl.expand_dims(channel * N + n, 5) + fourth
    inside = tl.expand_dims(in_dim, 5) & (tl.expand_dims(n, 5) + fourth < N)
    rates = split_four(tl.load(A + element, mask=inside, other=0).to(tl.float32) * LOG2_E)
    slot_stride = slot_elements(slot_stride, state)
    slot = tl.load(src + seq)
    read = tl.where(slot != 0, inside, False)
    S = split_four(tl.load(state + slot * slot_stride + element, mask=read, other=0).to(tl.float32))
    target = (state, slot_stride, element, inside)
    channel = tl.minimum(channel, DIM - 1)
    skip = tl.load(D + channel).to(tl.float32)
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + channel).to(tl.float32)

    inputs, weights = (x, dt, z, B, C), (rates, skip, bias)
    origin = start - context  # the token at position 0
    chunk = tl.load(seq_chunk_start + seq) - context // CHUNK - 1  # that before position 0
    # Groups of UNROLL tokens end where chunks end; before and after them tokens are taken one by one, or a lane each.
    body = tl.minimum(start + (UNROLL - context % UNROLL) % UNROLL, end)
    body_end = body + (end - body) // UNROLL * UNROLL
    for t in range(start - context % LANES, body, LANES):
        loaded = _load_tokens(inputs, t, start, end, channel, n, STRIDES, N, BLOCK_N, LANES, LANES, False, PACKED)
        S = _scan_tokens(S, loaded, weights, out, t, start, end, channel, in_dim, DIM, LANES, LANES, False, PACKED)
    if body_end > body:
        loaded = _load_tokens(inputs, body, start, end, channel, n, STRIDES, N, BLOCK_N, LANES, UNROLL, True, PACKED)
        for t in range(body, body_end, UNROLL):
            if AHEAD:  # the branch where a chunk ends keeps these loads before the scan that hides them
                ahead = tl.minimum(t + UNROLL, end - UNROLL)
                following = _load_tokens(
                    inputs, ahead, start, end, channel, n, STRIDES, N, BLOCK_N, LANES, UNROLL, True, PACKED
                )
            else:
                following = loaded
                loaded = _load_tokens(
                    inputs, t, start, end, channel, n, STRIDES, N, BLOCK_N, LANES, UNROLL, True, PACKED
                )
            S = _end_chunk(S, target, chunk_dst, chunk + (t - origin) // CHUNK, t, start, origin)
            S = _scan_tokens(S, loaded, weights, out, t, start, end, channel, in_dim, DIM, LANES, UNROLL, True, PACKED)
            loaded = following
    if body_end < end:
        S = _end_chunk(S, target, chunk_dst, chunk + (body_end - origin) // CHUNK, body_end, start, origin)
    for t in range(body_end, end, LANES):
        loaded = _load_tokens(inputs, t, start, end, channel, n, STRIDES, N, BLOCK_N, LANES, LANES, False, PACKED)
        S = _scan_tokens(S, loaded, weights, out, t, start, end, channel, in_dim, DIM, LANES, LANES, False, PACKED)
    store_states(S, target, tl.load(chunk_dst + tl.load(seq_chunk_start + seq + 1) - 1))


_launch = Launcher(_scan_kernel)


def prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    indices: StateIndices,
    out: Tensor,
) -> None:
    """Fills the prefill and padding tokens of `out` [F, dim] and stores states where `chunk_dst` says."""
    dim, width = A.shape
    block_N = max(triton.next_power_of_2(width), 4)
    full = min(max(block_N // 8, 1), 8)
    warps = dim * full // 32 * indices.num_prefills
    lanes, unroll, ahead = FEW if warps <= MANY_WARPS else MANY
    lanes = max(lanes * full // 2, 1)
    strides = tuple(stride for stride, _ in layer_strides(x, dt, x if z is None else z, B, C))
    places = (B.data_ptr(), C.data_ptr(), 2 * strides[3], 2 * strides[4], 2 * width)
    packed = B.element_size() == 2 and not any(place % 8 for place in places)
    _launch(
        (triton.cdiv(dim, 32 // lanes * WARPS), indices.num_prefills + 1, 1),
        (x, dt, A, B, C, D, z, dt_bias, state, out),
        (
            indices.query_start_loc,
            indices.context_len,
            indices.src,
            indices.chunk_dst,
            indices.seq_chunk_start,
            indices.longest_first,
            slot_stride(state),
            indices.num_prefills,
            len(x),
        ),
        {
            "STRIDES": strides,
            "DIM": dim,
            "N": width,
            "BLOCK_N": block_N,
            "PARTS": block_N // (4 * full),
            "LANES": lanes,
            "WARPS": WARPS,
            "UNROLL": max(unroll, lanes) if packed else lanes,
            "PACKED": packed,
            "AHEAD": ahead,
        },
        num_warps=WARPS,
    )
