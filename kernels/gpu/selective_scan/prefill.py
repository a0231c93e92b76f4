"""Run the selective scan over prefill rows."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.chunks import CHUNK, ROW_ARRAYS, prefill_row, row_and_tile
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, layer_strides, slot_elements, slot_stride
from ..common.structs import aggregate
from .math import (
    Lanes,
    Weights,
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
    """Divide a warp's work for 16 states. More states take more lanes, fewer tokens and one channel."""

    lanes: int  # that share a channel
    channels: int
    tokens: int  # loaded at a time
    registers: int  # per thread, at most


SHORT_CHAIN = Tiles(lanes=4, channels=1, tokens=16, registers=255)  # for few warps
MANY_WARPS = Tiles(lanes=2, channels=2, tokens=4, registers=128)  # for more warps than run at once
SHORT_CHAIN_WARPS = 2112  # above it, MANY_WARPS applies


@aggregate
class Inputs:
    """Hold tensors of tokens, z perhaps None, and their strides of tokens in this order."""

    x: tl.tensor
    dt: tl.tensor
    z: tl.tensor
    B: tl.tensor
    C: tl.tensor
    STRIDES: tl.tuple
    N: tl.constexpr
    BLOCK_N: tl.constexpr


@aggregate
class Target:
    """Hold where a program's states and outputs go."""

    state: tl.tensor
    slot_stride: tl.tensor
    element: tl.tensor  # of states in a slot
    out: tl.tensor
    channel: tl.tensor
    in_dim: tl.tensor
    OUT_STRIDE: tl.constexpr


@triton.jit
def _load_tokens(inputs, row, t, channel, LANES: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """Load x, dt and z of COUNT tokens, a token per lane, and B and C [COUNT, BLOCK_N] in fp32.

    Unless WHOLE, tokens outside the batch row become its first or last token.
    """
    STRIDES: tl.constexpr = inputs.STRIDES
    wide = tl.cast(t, tl.int64)
    lane = tl.arange(0, LANES)[:, None, None]
    loaded = ()
    for i in tl.static_range(0, COUNT, LANES):
        offset = lane if WHOLE else tl.minimum(tl.maximum(t + i + lane, row.start), row.end - 1) - t - i
        tiles = (tl.load(inputs.x + wide * STRIDES[0] + (offset * STRIDES[0] + channel) + i * STRIDES[0]),)
        tiles = tiles + (tl.load(inputs.dt + wide * STRIDES[1] + (offset * STRIDES[1] + channel) + i * STRIDES[1]),)
        if inputs.z is not None:
            tiles = tiles + (tl.load(inputs.z + wide * STRIDES[2] + (offset * STRIDES[2] + channel) + i * STRIDES[2]),)
        loaded = loaded + (tiles,)
    offset = tl.arange(0, COUNT)[:, None]
    if not WHOLE:
        offset = tl.minimum(tl.maximum(t + offset, row.start), row.end - 1) - t
    n = tl.arange(0, inputs.BLOCK_N)[None, :]
    mask = n < inputs.N
    b = tl.load(inputs.B + wide * STRIDES[3] + (offset * STRIDES[3] + n), mask=mask, other=0).to(tl.float32)
    c = tl.load(inputs.C + wide * STRIDES[4] + (offset * STRIDES[4] + n), mask=mask, other=0).to(tl.float32)
    return loaded, b, c


@triton.jit
def _rows(matrix, LANES: tl.constexpr):
    """Split [COUNT, BLOCK_N] into a tuple per token of tiles [LANES, 1, 1], a state per lane."""
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
def _scan_tokens(S, loaded, weights, target, row, t, LANES: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """Take states through COUNT tokens and store outputs. Tokens outside the batch row change nothing."""
    STRIDE: tl.constexpr = target.OUT_STRIDE
    loaded, b, c = loaded
    b, c = _rows(b, LANES), _rows(c, LANES)
    lane = tl.arange(0, LANES)[:, None, None]
    for i in tl.static_range(0, COUNT, LANES):
        tiles = loaded[i // LANES]
        x = tiles[0].to(tl.float32)
        step = step_size(tiles[1].to(tl.float32), weights.bias)
        stored = target.in_dim
        if not WHOLE:
            valid = (t + i + lane >= row.start) & (t + i + lane < row.end)
            step = tl.where(valid, step, 0.0)
            stored = valid & target.in_dim
        u = step * x
        y = tl.zeros_like(step)
        for j in tl.static_range(LANES):
            S, read = advance(S, of_lane(step, j), of_lane(u, j), weights.rates, b[i + j], c[i + j])
            y = tl.where(lane == j, read, y)
        y = tl.fma(weights.skip, x, y)
        if len(tiles) == 3:
            y = y * silu(tiles[2].to(tl.float32))
        place = target.out + tl.cast(t, tl.int64) * STRIDE + (lane * STRIDE + target.channel) + i * STRIDE
        tl.store(place, y.to(place.dtype.element_ty), mask=stored)
    return S


@triton.jit
def _store(S, target, lanes, dst):
    if dst != 0:
        store_states(target.state + dst * target.slot_stride, target.element, lanes, target.in_dim, S)


@triton.jit
def _end_chunk(S, target, lanes, dst, t, start, origin):
    """Return the states before token t, rounded and stored if a chunk ends there; position 0 is at `origin`."""
    STATE: tl.constexpr = target.state.dtype.element_ty
    boundary = (t - origin) % CHUNK == 0
    if STATE != tl.float32 and boundary:
        S = rounded(S, STATE)
    if boundary & (t > start):
        _store(S, target, lanes, tl.load(dst))
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
    """Carry states through one batch row, in one warp."""
    CHANNELS: tl.constexpr = 32 // LANES
    FOURS: tl.constexpr = BLOCK_N // (4 * LANES)
    index, tile = row_and_tile((DIM + CHANNELS * PER_LANE - 1) // (CHANNELS * PER_LANE))
    channel = (tile * CHANNELS + channels_of(CHANNELS)) * PER_LANE
    channel = channel + tl.arange(0, PER_LANE)[None, None, :]
    in_dim = channel < DIM

    if index == num_prefills:
        for t in range(tl.load(query_start_loc + num_prefills), num_tokens):
            zeros = tl.zeros([1, CHANNELS, PER_LANE], out.dtype.element_ty)
            tl.store(out + tl.cast(t, tl.int64) * OUT_STRIDE + channel, zeros, mask=in_dim)
        return

    row = prefill_row(rows, index)
    start, end, context, slot = row.start, row.end, row.context, row.slot
    if start == end:
        return
    lanes = Lanes(first_state(LANES, FOURS), N, FOURS)
    element = channel * N + lanes.first
    rates = load_states(A, element, lanes, in_dim)
    slot_stride = slot_elements(slot_stride, state)
    S = load_states(state + slot * slot_stride, element, lanes, tl.where(slot != 0, in_dim, False))
    if DIM % (CHANNELS * PER_LANE) != 0:
        channel = tl.minimum(channel, DIM - 1)
    target = Target(state, slot_stride, element, out, channel, in_dim, OUT_STRIDE)
    skip = tl.load(D + channel).to(tl.float32)
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + channel).to(tl.float32)

    inputs, weights = Inputs(x, dt, z, B, C, STRIDES, N, BLOCK_N), Weights(in_log2(rates), skip, bias)
    origin = start - context
    chunk = row.first_chunk - context // CHUNK - 1  # the chunk before position 0
    # Groups of COUNT tokens end where chunks end. Other tokens come LANES at a time.
    body = tl.minimum(start + (COUNT - context % COUNT) % COUNT, end)
    body_end = body + (end - body) // COUNT * COUNT
    for t in range(start - context % LANES, body, LANES):
        loaded = _load_tokens(inputs, row, t, channel, LANES, LANES, False)
        S = _scan_tokens(S, loaded, weights, target, row, t, LANES, LANES, False)
    if body_end > body:
        loaded = _load_tokens(inputs, row, body, channel, LANES, COUNT, True)
        for t in range(body, body_end, COUNT):
            # The branch in `_end_chunk` keeps these loads before the scan that hides them.
            following = _load_tokens(inputs, row, tl.minimum(t + COUNT, end - COUNT), channel, LANES, COUNT, True)
            dst = chunk_dst + (chunk + (t - origin) // CHUNK)
            S = _end_chunk(S, target, lanes, dst, t, start, origin)
            S = _scan_tokens(S, loaded, weights, target, row, t, LANES, COUNT, True)
            loaded = following
    if body_end < end:
        dst = chunk_dst + (chunk + (body_end - origin) // CHUNK)
        S = _end_chunk(S, target, lanes, dst, body_end, start, origin)
    for t in range(body_end, end, LANES):
        loaded = _load_tokens(inputs, row, t, channel, LANES, LANES, False)
        S = _scan_tokens(S, loaded, weights, target, row, t, LANES, LANES, False)
    _store(S, target, lanes, tl.load(chunk_dst + row.last_chunk - 1))


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
