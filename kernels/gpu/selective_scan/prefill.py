"""Run the selective scan (arXiv:2312.00752) over prefill rows, in one Triton launch.

Every token takes the states S [dim, N], in registers, through

    S = exp(dt A) S + dt x B;  y = S C + D x

so results do not depend on where a sequence is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.chunks import CHUNK, ROW_ARRAYS, prefill_row, row_and_tile
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, layer_strides, slot_elements, slot_stride
from .math import (
    advance,
    channels_of,
    first_state,
    in_log2,
    load_states,
    of_lane,
    rounded,
    silu,
    step_size,
    store_states,
    tile_of,
)


@dataclass(frozen=True)
class Tiles:
    """Divide a warp's work for a state size N of 16. A larger N takes more lanes, fewer tokens, one channel."""

    lanes: int  # that share a channel
    channels: int
    tokens: int  # loaded at a time
    registers: int  # per thread, at most


SHORT_CHAIN = Tiles(lanes=4, channels=1, tokens=16, registers=255)  # for few warps
MANY_WARPS = Tiles(lanes=2, channels=2, tokens=4, registers=128)  # for more warps than run at once
SHORT_CHAIN_WARPS = 2112  # above it, MANY_WARPS applies


@triton.jit
def _load_tokens(
    inputs,
    t,
    start,
    end,
    channel,
    STRIDES: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    COUNT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Load x, dt and z of COUNT tokens from t on, a token per lane, and their B and C [COUNT, BLOCK_N] in fp32.

    Unless WHOLE, the first or last token of the batch row replaces tokens outside it.
    """
    x, dt, z, B, C = inputs
    wide = tl.cast(t, tl.int64)
    lane = tl.arange(0, LANES)[:, None, None]
    loaded = ()
    for i in tl.static_range(0, COUNT, LANES):
        offset = lane if WHOLE else tl.minimum(tl.maximum(t + i + lane, start), end - 1) - t - i
        tiles = (tl.load(x + wide * STRIDES[0] + (offset * STRIDES[0] + channel) + i * STRIDES[0]),)
        tiles = tiles + (tl.load(dt + wide * STRIDES[1] + (offset * STRIDES[1] + channel) + i * STRIDES[1]),)
        if z is not None:
            tiles = tiles + (tl.load(z + wide * STRIDES[2] + (offset * STRIDES[2] + channel) + i * STRIDES[2]),)
        loaded = loaded + (tiles,)
    offset = tl.arange(0, COUNT)[:, None]
    if not WHOLE:
        offset = tl.minimum(tl.maximum(t + offset, start), end - 1) - t
    n = tl.arange(0, BLOCK_N)[None, :]
    b = tl.load(B + wide * STRIDES[3] + (offset * STRIDES[3] + n), mask=n < N, other=0).to(tl.float32)
    c = tl.load(C + wide * STRIDES[4] + (offset * STRIDES[4] + n), mask=n < N, other=0).to(tl.float32)
    return loaded, b, c


@triton.jit
def _rows(matrix, LANES: tl.constexpr):
    """Split [COUNT, BLOCK_N] into a tuple of tiles [LANES, 1, 1] per token, with a state of each lane per tile."""
    COUNT: tl.constexpr = matrix.shape[0]
    WIDTH: tl.constexpr = matrix.shape[1] // LANES
    if LANES == 8:
        matrix = tl.permute(tl.reshape(matrix, (COUNT, 2, 2, 2, WIDTH)), (3, 2, 1, 4, 0))
    elif LANES == 4:
        matrix = tl.permute(tl.reshape(matrix, (COUNT, 2, 2, WIDTH)), (2, 1, 3, 0))
    else:
        matrix = tl.permute(tl.reshape(matrix, (COUNT, LANES, WIDTH)), (1, 2, 0))
    parts = (tl.reshape(matrix, (LANES, 1, 1, WIDTH * COUNT)),)
    for _ in tl.static_range(16):
        if parts[0].shape[-1] > 1:
            even, odd = (), ()
            for i in tl.static_range(len(parts)):
                pair = tl.split(tl.reshape(parts[i], (LANES, 1, 1, parts[0].shape[-1] // 2, 2)))
                even, odd = even + (pair[0],), odd + (pair[1],)
            parts = even + odd
    rows = ()
    for j in tl.static_range(COUNT):
        row = ()
        for i in tl.static_range(WIDTH):
            row = row + (tl.reshape(parts[i * COUNT + j], (LANES, 1, 1)),)
        rows = rows + (row,)
    return rows


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
    STRIDE: tl.constexpr,
    LANES: tl.constexpr,
    COUNT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Take the states through COUNT tokens from t on and store their outputs, STRIDE apart.

    Tokens outside the batch row change nothing.
    """
    rates, skip, bias = weights
    loaded, b, c = loaded
    b, c = _rows(b, LANES), _rows(c, LANES)
    lane = tl.arange(0, LANES)[:, None, None]
    for i in tl.static_range(0, COUNT, LANES):
        tiles = loaded[i // LANES]
        x = tiles[0].to(tl.float32)
        step = step_size(tiles[1].to(tl.float32), bias)
        stored = in_dim
        if not WHOLE:
            valid = (t + i + lane >= start) & (t + i + lane < end)
            step = tl.where(valid, step, 0.0)
            stored = valid & in_dim
        u = step * x
        y = tl.zeros_like(step)
        for j in tl.static_range(LANES):
            S, read = advance(S, of_lane(step, j), of_lane(u, j), rates, b[i + j], c[i + j])
            y = tl.where(lane == j, read, y)
        y = tl.fma(skip, x, y)
        if len(tiles) == 3:
            y = y * silu(tiles[2].to(tl.float32))
        place = out + tl.cast(t, tl.int64) * STRIDE + (lane * STRIDE + channel) + i * STRIDE
        tl.store(place, y.to(out.dtype.element_ty), mask=stored)
    return S


@triton.jit
def _store(S, target, dst, N: tl.constexpr):
    state, slot_stride, element, n, in_dim = target
    if dst != 0:
        store_states(state + dst * slot_stride, element, n, in_dim, S, N)


@triton.jit
def _end_chunk(S, target, chunk_dst, chunk, t, start, origin, N: tl.constexpr):
    """Return the states before token t. If `chunk` ends there, round them as stored, and store them in its dst."""
    STATE: tl.constexpr = target[0].dtype.element_ty
    boundary = (t - origin) % CHUNK == 0
    if STATE != tl.float32 and boundary:
        S = rounded(S, STATE)
    if boundary & (t > start):
        _store(S, target, tl.load(chunk_dst + chunk), N)
    return S


@triton.jit(do_not_specialize=["num_prefills", "slot_stride", "num_tokens"])
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
    rows,
    chunk_dst,
    num_prefills,
    slot_stride,
    num_tokens,
    STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    PER_LANE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Carry the states of some channels through one sequence, in one warp."""
    CHANNELS: tl.constexpr = 32 // LANES
    FOURS: tl.constexpr = BLOCK_N // (4 * LANES)
    row, tile = row_and_tile((DIM + CHANNELS * PER_LANE - 1) // (CHANNELS * PER_LANE))
    channel = (tile * CHANNELS + channels_of(CHANNELS)) * PER_LANE
    channel = channel + tl.arange(0, PER_LANE)[None, None, :]
    in_dim = channel < DIM

    if row == num_prefills:
        for t in range(tl.load(query_start_loc + num_prefills), num_tokens):
            zeros = tl.zeros([1, CHANNELS, PER_LANE], out.dtype.element_ty)
            tl.store(out + tl.cast(t, tl.int64) * OUT_STRIDE + channel, zeros, mask=in_dim)
        return

    batch_row = prefill_row(rows, row)
    start, end, context, slot = batch_row.start, batch_row.end, batch_row.context, batch_row.slot
    if start == end:
        return
    n = first_state(LANES, FOURS)
    element = channel * N + n
    rates = load_states(A, element, n, in_dim, N, FOURS)
    slot_stride = slot_elements(slot_stride, state)
    S = load_states(state + slot * slot_stride, element, n, tl.where(slot != 0, in_dim, False), N, FOURS)
    target = (state, slot_stride, element, n, in_dim)
    if DIM % (CHANNELS * PER_LANE) != 0:
        channel = tl.minimum(channel, DIM - 1)
    skip = tl.load(D + channel).to(tl.float32)
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + channel).to(tl.float32)

    inputs, weights = (x, dt, z, B, C), (in_log2(rates), skip, bias)
    origin = start - context
    chunk = batch_row.first_chunk - context // CHUNK - 1  # the chunk before position 0
    # Groups of COUNT tokens end where chunks end. Tokens before and after them come LANES at a time.
    body = tl.minimum(start + (COUNT - context % COUNT) % COUNT, end)
    body_end = body + (end - body) // COUNT * COUNT
    for t in range(start - context % LANES, body, LANES):
        loaded = _load_tokens(inputs, t, start, end, channel, STRIDES, N, BLOCK_N, LANES, LANES, False)
        S = _scan_tokens(S, loaded, weights, out, t, start, end, channel, in_dim, OUT_STRIDE, LANES, LANES, False)
    if body_end > body:
        loaded = _load_tokens(inputs, body, start, end, channel, STRIDES, N, BLOCK_N, LANES, COUNT, True)
        for t in range(body, body_end, COUNT):
            # Load a group ahead: the branch in `_end_chunk` keeps these loads before the scan that hides them.
            ahead = tl.minimum(t + COUNT, end - COUNT)
            following = _load_tokens(inputs, ahead, start, end, channel, STRIDES, N, BLOCK_N, LANES, COUNT, True)
            S = _end_chunk(S, target, chunk_dst, chunk + (t - origin) // CHUNK, t, start, origin, N)
            S = _scan_tokens(S, loaded, weights, out, t, start, end, channel, in_dim, OUT_STRIDE, LANES, COUNT, True)
            loaded = following
    if body_end < end:
        S = _end_chunk(S, target, chunk_dst, chunk + (body_end - origin) // CHUNK, body_end, start, origin, N)
    for t in range(body_end, end, LANES):
        loaded = _load_tokens(inputs, t, start, end, channel, STRIDES, N, BLOCK_N, LANES, LANES, False)
        S = _scan_tokens(S, loaded, weights, out, t, start, end, channel, in_dim, OUT_STRIDE, LANES, LANES, False)
    _store(S, target, tl.load(chunk_dst + batch_row.last_chunk - 1), N)


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
    """Fill prefill and padding tokens of `out` [F, dim] and store states at `chunk_dst`."""
    dim, width = A.shape
    strides = tuple(stride for stride, _ in layer_strides(x, dt, x if z is None else z, B, C))
    tiles = SHORT_CHAIN if dim // 8 * indices.num_prefills <= SHORT_CHAIN_WARPS else MANY_WARPS
    block_N, lanes = tile_of(width, tiles.lanes)
    narrow = block_N <= 16
    per_lane = tiles.channels if narrow else 1
    _launch(
        cdiv(dim, 32 // lanes * per_lane) * (indices.num_prefills + 1),
        (x, dt, A, B, C, D, z, dt_bias, state, out),
        index_pointers(indices, ROW_ARRAYS),
        (indices.num_prefills, slot_stride(state), len(x)),
        {
            "STRIDES": strides,
            "OUT_STRIDE": out.stride(0),
            "DIM": dim,
            "N": width,
            "BLOCK_N": block_N,
            "LANES": lanes,
            "PER_LANE": per_lane,
            "COUNT": max(tiles.tokens * 16 // max(block_N, 16), lanes),
        },
        num_warps=1,
        maxnreg=tiles.registers if narrow else 255,
    )
