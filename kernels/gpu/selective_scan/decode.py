"""Run the selective scan over decode rows and their token logs."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.chunks import row_and_tile
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, layer_strides, slot_elements, slot_stride
from ..common.log import slot_of
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
    silu,
    step_size,
    store_states,
    tile_of,
)

LANES = 4  # of a warp that share a channel, for a state size of 16
ARRAYS = "decode_src", "decode_len", "decode_dst", "log_slot", "log_start", "log_end", "ancestors"


@aggregate
class Entries:
    """Hold x, dt and B of logged or new tokens, and their strides."""

    x: tl.tensor
    dt: tl.tensor
    B: tl.tensor
    X_STRIDE: tl.constexpr
    DT_STRIDE: tl.constexpr
    B_STRIDE: tl.constexpr


@aggregate
class Tokens:
    """Hold the inputs of new tokens; z may be None."""

    entries: Entries
    C: tl.tensor
    z: tl.tensor
    C_STRIDE: tl.constexpr
    Z_STRIDE: tl.constexpr


@aggregate
class Tile:
    """Hold a channel per lane, whether it exists, and the states of lanes."""

    lane: tl.tensor
    channel: tl.tensor
    in_dim: tl.tensor
    lanes: Lanes


@triton.jit
def _load_entry(entries, e, tile, known):
    """Load x and dt of entry `e`, a channel per lane, and its B; zeros unless `known`."""
    x, dt = entries.x + e * entries.X_STRIDE, entries.dt + e * entries.DT_STRIDE
    B, n = entries.B + e * entries.B_STRIDE, tile.lanes.first
    mine = tl.where(known, tile.in_dim, False)
    u = tl.load(x + tile.channel, mask=mine, other=0)
    step = tl.load(dt + tile.channel, mask=mine, other=0)
    return u, step, load_states(B, n, tile.lanes, tl.where(known, n < tile.lanes.N, False))


@triton.jit
def _load_token(tokens, t, tile, known):
    entry, n = _load_entry(tokens.entries, t, tile, known), tile.lanes.first
    c = load_states(tokens.C, t * tokens.C_STRIDE + n, tile.lanes, tl.where(known, n < tile.lanes.N, False))
    mine = tl.where(known, tile.in_dim, False)
    gate = 0.0 if tokens.z is None else tl.load(tokens.z + t * tokens.Z_STRIDE + tile.channel, mask=mine, other=0)
    return entry, c, gate


@triton.jit
def _store_entry(log, e, tile, entry, mine, shared):
    u, step, b = entry
    n = tile.lanes.first
    tl.store(log.x + e * log.X_STRIDE + tile.channel, u, mask=mine)
    tl.store(log.dt + e * log.DT_STRIDE + tile.channel, step, mask=mine)
    store_states(log.B, e * log.B_STRIDE + n, tile.lanes, tl.where(shared, n < tile.lanes.N, False), b)


@triton.jit
def _apply(S, weights, tile, entry, c):
    """Apply one token. Return the states after it and its output before the gate, a channel per lane."""
    u, step, b = entry
    value, size = u.to(tl.float32), step_size(step.to(tl.float32), weights.bias)
    y, states = tl.zeros_like(size), ()
    for j in tl.static_range(len(S)):
        after, read = advance(S[j], of_lane(size, j), of_lane(size * value, j), weights.rates[j], b, c)
        y, states = tl.where(tile.lane == j, read, y), states + (after,)
    return states, tl.fma(weights.skip, value, y)


@triton.jit
def _select(condition, states, others):
    result = ()
    for i in tl.static_range(len(states)):
        result = result + (tl.where(condition, states[i], others[i]),)
    return result


@triton.jit(
    do_not_specialize=[
        "slot_stride", "x_stride", "dt_stride", "B_stride", "carried_stride", "stands_stride", "tokens_per_decode"
    ]
)  # fmt: skip
def _decode_kernel(
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
    log_x,
    log_dt,
    log_B,
    carried,
    stands,
    src,
    lengths,
    dst,
    slots,
    starts,
    ends,
    ancestors,
    slot_stride,
    x_stride,
    dt_stride,
    B_stride,
    carried_stride,
    stands_stride,
    tokens_per_decode,
    STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Carry states of GROUPS * 32 / LANES channels through a batch row's tokens, in one warp.

    A branch repeats its path from the state after the first token.
    """
    CHANNELS: tl.constexpr = 32 // LANES
    FOURS: tl.constexpr = BLOCK_N // (4 * LANES)
    lane = tl.arange(0, LANES)[:, None, None]
    row, part = row_and_tile((DIM + GROUPS * CHANNELS - 1) // (GROUPS * CHANNELS))
    first = part * (GROUPS * CHANNELS) + channels_of(CHANNELS)
    lanes = Lanes(first_state(LANES, FOURS), N, FOURS)
    slot_stride = slot_elements(slot_stride, state)
    source, length, target = tl.load(src + row), tl.load(lengths + row), tl.load(dst + row)
    slot, start, end = tl.load(slots + row).to(tl.int64), tl.load(starts + row), tl.load(ends + row)
    log_x, log_dt = slot_of(log_x, slot, x_stride), slot_of(log_dt, slot, dt_stride)
    log = Entries(log_x, log_dt, slot_of(log_B, slot, B_stride), DIM, DIM, N)
    carried, stands = slot_of(carried, slot, carried_stride), slot_of(stands, slot, stands_stride)
    known = (start < end) & (length > 0)
    oldest = tl.load(stands + part * (GROUPS * CHANNELS), mask=known, other=end)
    channel = first + lane * CHANNELS
    in_dim = (lane < GROUPS) & (channel < DIM)
    token = row.to(tl.int64) * tokens_per_decode
    inputs = Entries(x, dt, B, STRIDES[0], STRIDES[1], STRIDES[3])
    tokens, tile = Tokens(inputs, C, z, STRIDES[4], STRIDES[2]), Tile(lane, channel, in_dim, lanes)
    entry, c, gate = _load_token(tokens, token, tile, length > 0)
    S, rates, elements, insides = (), (), (), ()
    for j in tl.static_range(GROUPS):
        group = first + j * CHANNELS
        element, inside = group * N + lanes.first, group < DIM
        mine = tl.where(known | (source != 0) & (length > 0), inside, False)
        if state.dtype == carried.dtype:
            held = tl.where(known, carried, state + source * slot_stride)
            S = S + (load_states(held, element, lanes, mine),)
        else:
            old = load_states(state, source * slot_stride + element, lanes, tl.where(known, False, mine))
            S = S + (_select(known, load_states(carried, element, lanes, tl.where(known, mine, False)), old),)
        elements, insides = elements + (element,), insides + (inside,)
    tl.debug_barrier()  # or the compiler makes states wait for A and reuses its registers
    for j in tl.static_range(GROUPS):
        rates = rates + (in_log2(load_states(A, elements[j], lanes, insides[j])),)
    skip = tl.load(D + channel, mask=in_dim, other=0).to(tl.float32)
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + channel, mask=in_dim, other=0).to(tl.float32)
    weights = Weights(rates, skip, bias)

    for e in range(oldest, end):
        past = _load_entry(log, e, tile, e < end)
        S, _ = _apply(S, weights, tile, past, past[2])

    mine = tl.where(length > 0, in_dim, False)
    _store_entry(log, end, tile, entry, mine, (part == 0) & (length > 0))
    S, y = _apply(S, weights, tile, entry, c)
    for j in tl.static_range(GROUPS):  # this token is final: later tokens may be rejected
        store_states(carried, elements[j], lanes, tl.where(length > 0, insides[j], False), S[j])
    tl.store(stands + channel, tl.zeros_like(channel) + end + 1, mask=mine)
    if z is not None:
        y *= silu(gate.to(tl.float32))
    tl.store(out + token * OUT_STRIDE + channel, tl.where(length > 0, y, 0).to(out.dtype.element_ty), mask=in_dim)
    if DRAFTS:
        entry, c, gate = _load_token(tokens, token + 1, tile, length > 1)
        for t in range(1, length):
            token += 1
            path = tl.load(ancestors + token)
            if (path >> (t - 1)) & 1 == 0:
                tl.debug_barrier()  # other threads may have stored `carried`
                S = ()
                for j in tl.static_range(GROUPS):
                    S = S + (load_states(carried, elements[j], lanes, insides[j]),)
                for e in range(1, t):
                    if (path >> e) & 1 == 1:
                        past = _load_entry(inputs, token - t + e, tile, e < t)
                        S, _ = _apply(S, weights, tile, past, past[2])
            _store_entry(log, end + t, tile, entry, in_dim, part == 0)
            S, y = _apply(S, weights, tile, entry, c)
            if z is not None:
                y *= silu(gate.to(tl.float32))
            tl.store(out + token * OUT_STRIDE + channel, y.to(out.dtype.element_ty), mask=in_dim)
            entry, c, gate = _load_token(tokens, token + 1, tile, t + 1 < length)
    for j in tl.static_range(GROUPS):
        stored = tl.where((target != 0) & (length > 0), insides[j], False)
        store_states(state, target * slot_stride + elements[j], lanes, stored, S[j])
    if DRAFTS:
        for _ in range(tl.maximum(length, 1), tokens_per_decode):
            token += 1
            tl.store(out + token * OUT_STRIDE + channel, tl.zeros_like(skip).to(out.dtype.element_ty), mask=in_dim)


_launch = Launcher(_decode_kernel)


def decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    out: Tensor,
) -> None:
    """Fill the decode tokens of `out` [F, dim], log them, and store states at `decode_dst`."""
    dim, width = A.shape
    strides = tuple(stride for stride, _ in layer_strides(x, dt, x if z is None else z, B, C))
    block_N, lanes = tile_of(width, LANES)
    groups = min(lanes, max(128 // block_N, 1))
    _launch(
        cdiv(dim, 32 // lanes * groups) * indices.num_decodes,
        (x, dt, A, B, C, D, z, dt_bias, state, out, *log),
        index_pointers(indices, ARRAYS),
        (slot_stride(state), *map(slot_stride, log), indices.tokens_per_decode),
        {
            "STRIDES": strides,
            "OUT_STRIDE": out.stride(0),
            "DIM": dim,
            "N": width,
            "BLOCK_N": block_N,
            "LANES": lanes,
            "GROUPS": groups,
            "DRAFTS": indices.tokens_per_decode > 1,  # without drafts, registers suffice for more programs
        },
        num_warps=1,
    )
