"""Run the selective scan over decode rows and their token logs, in one Triton launch."""

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
from .math import (
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


@triton.jit
def _load_entry(x, dt, B, channel, in_dim, n, known, N: tl.constexpr, FOURS: tl.constexpr):
    """Load x and dt of a token, a channel per lane, and its B; zeros unless `known`."""
    mine = tl.where(known, in_dim, False)
    u = tl.load(x + channel, mask=mine, other=0)
    step = tl.load(dt + channel, mask=mine, other=0)
    return u, step, load_states(B, n, n, tl.where(known, n < N, False), N, FOURS)


@triton.jit
def _load_token(
    x, dt, B, C, z, token, channel, in_dim, n, known, STRIDES: tl.constexpr, N: tl.constexpr, FOURS: tl.constexpr
):
    u, step, b = _load_entry(
        x + token * STRIDES[0], dt + token * STRIDES[1], B + token * STRIDES[3], channel, in_dim, n, known, N, FOURS
    )
    c = load_states(C, token * STRIDES[4] + n, n, tl.where(known, n < N, False), N, FOURS)
    mine = tl.where(known, in_dim, False)
    gate = 0.0 if z is None else tl.load(z + token * STRIDES[2] + channel, mask=mine, other=0)
    return u, step, b, c, gate


@triton.jit
def _store_entry(log_x, log_dt, log_B, entry, u, step, b, channel, mine, n, shared, DIM: tl.constexpr, N: tl.constexpr):
    tl.store(log_x + entry * DIM + channel, u, mask=mine)
    tl.store(log_dt + entry * DIM + channel, step, mask=mine)
    store_states(log_B, entry * N + n, n, tl.where(shared, n < N, False), b, N)


@triton.jit
def _apply(S, rates, u, step, b, c, skip, bias, lane):
    """Apply one token. Return the states after it and its output before the gate, a channel per lane."""
    value, size = u.to(tl.float32), step_size(step.to(tl.float32), bias)
    y, states = tl.zeros_like(size), ()
    for j in tl.static_range(len(S)):
        after, read = advance(S[j], of_lane(size, j), of_lane(size * value, j), rates[j], b, c)
        y, states = tl.where(lane == j, read, y), states + (after,)
    return states, tl.fma(skip, value, y)


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
    """Carry the states of GROUPS * 32 / LANES channels per program, a warp, through a batch row's tokens.

    If a token's parent is not the previous token, its path is repeated from the state after the first token.
    """
    CHANNELS: tl.constexpr = 32 // LANES
    FOURS: tl.constexpr = BLOCK_N // (4 * LANES)
    lane = tl.arange(0, LANES)[:, None, None]
    row, tile = row_and_tile((DIM + GROUPS * CHANNELS - 1) // (GROUPS * CHANNELS))
    first = tile * (GROUPS * CHANNELS) + channels_of(CHANNELS)
    n = first_state(LANES, FOURS)
    slot_stride = slot_elements(slot_stride, state)
    source, length, target = tl.load(src + row), tl.load(lengths + row), tl.load(dst + row)
    slot, start, end = tl.load(slots + row).to(tl.int64), tl.load(starts + row), tl.load(ends + row)
    log_x, log_dt = slot_of(log_x, slot, x_stride), slot_of(log_dt, slot, dt_stride)
    log_B = slot_of(log_B, slot, B_stride)
    carried, stands = slot_of(carried, slot, carried_stride), slot_of(stands, slot, stands_stride)
    known = (start < end) & (length > 0)
    entry = tl.load(stands + tile * (GROUPS * CHANNELS), mask=known, other=end)
    channel = first + lane * CHANNELS
    in_dim = (lane < GROUPS) & (channel < DIM)
    token = row.to(tl.int64) * tokens_per_decode
    u, step, b, c, gate = _load_token(x, dt, B, C, z, token, channel, in_dim, n, length > 0, STRIDES, N, FOURS)
    S, rates, elements, insides = (), (), (), ()
    for j in tl.static_range(GROUPS):
        group = first + j * CHANNELS
        element, inside = group * N + n, group < DIM
        mine = tl.where(known | (source != 0) & (length > 0), inside, False)
        if state.dtype == carried.dtype:
            held = tl.where(known, carried, state + source * slot_stride)
            S = S + (load_states(held, element, n, mine, N, FOURS),)
        else:
            old = load_states(state, source * slot_stride + element, n, tl.where(known, False, mine), N, FOURS)
            S = S + (_select(known, load_states(carried, element, n, tl.where(known, mine, False), N, FOURS), old),)
        elements, insides = elements + (element,), insides + (inside,)
    tl.debug_barrier()  # or the compiler makes states wait for A and reuses its registers
    for j in tl.static_range(GROUPS):
        rates = rates + (in_log2(load_states(A, elements[j], n, insides[j], N, FOURS)),)
    skip = tl.load(D + channel, mask=in_dim, other=0).to(tl.float32)
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + channel, mask=in_dim, other=0).to(tl.float32)

    for e in range(entry, end):
        past, size, past_b = _load_entry(
            log_x + e * DIM, log_dt + e * DIM, log_B + e * N, channel, in_dim, n, e < end, N, FOURS
        )
        S, _ = _apply(S, rates, past, size, past_b, past_b, skip, bias, lane)

    mine = tl.where(length > 0, in_dim, False)
    _store_entry(log_x, log_dt, log_B, end, u, step, b, channel, mine, n, (tile == 0) & (length > 0), DIM, N)
    S, y = _apply(S, rates, u, step, b, c, skip, bias, lane)
    for j in tl.static_range(GROUPS):  # this token is final: later tokens may be rejected
        store_states(carried, elements[j], n, tl.where(length > 0, insides[j], False), S[j], N)
    tl.store(stands + channel, tl.zeros_like(channel) + end + 1, mask=mine)
    if z is not None:
        y *= silu(gate.to(tl.float32))
    tl.store(out + token * OUT_STRIDE + channel, tl.where(length > 0, y, 0).to(out.dtype.element_ty), mask=in_dim)
    if DRAFTS:
        u, step, b, c, gate = _load_token(x, dt, B, C, z, token + 1, channel, in_dim, n, length > 1, STRIDES, N, FOURS)
        for t in range(1, length):
            token += 1
            path = tl.load(ancestors + token)
            if (path >> (t - 1)) & 1 == 0:
                tl.debug_barrier()  # other threads may have stored `carried`
                S = ()
                for j in tl.static_range(GROUPS):
                    S = S + (load_states(carried, elements[j], n, insides[j], N, FOURS),)
                for e in range(1, t):
                    if (path >> e) & 1 == 1:
                        ancestor = token - t + e
                        past, size, past_b = _load_entry(
                            x + ancestor * STRIDES[0], dt + ancestor * STRIDES[1], B + ancestor * STRIDES[3],
                            channel, in_dim, n, e < t, N, FOURS,
                        )  # fmt: skip
                        S, _ = _apply(S, rates, past, size, past_b, past_b, skip, bias, lane)
            _store_entry(log_x, log_dt, log_B, end + t, u, step, b, channel, in_dim, n, tile == 0, DIM, N)
            S, y = _apply(S, rates, u, step, b, c, skip, bias, lane)
            if z is not None:
                y *= silu(gate.to(tl.float32))
            tl.store(out + token * OUT_STRIDE + channel, y.to(out.dtype.element_ty), mask=in_dim)
            u, step, b, c, gate = _load_token(
                x, dt, B, C, z, token + 1, channel, in_dim, n, t + 1 < length, STRIDES, N, FOURS
            )
    for j in tl.static_range(GROUPS):
        stored = tl.where((target != 0) & (length > 0), insides[j], False)
        store_states(state, target * slot_stride + elements[j], n, stored, S[j], N)
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
