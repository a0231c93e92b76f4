"""Prepare the new tokens of a decode row of state-space duality, before its states are read."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.decays import LOG2_E, softplus
from ..common.log import LEAST_DECAY, WINDOW, depth_of, parent_place

SCALARS = tl.constexpr(2)  # per token and head: the decay of the state, and the factor of x


@triton.jit
def _load_token(
    dt,
    B,
    C,
    token,
    computed,
    head,
    group,
    channel,
    in_group,
    in_N,
    DT_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
):
    """Load a token's step sizes of the group's heads, B and C; zeros for a token that is not computed."""
    known, mine = tl.where(computed, in_N, False), tl.where(computed, in_group, False)
    size = tl.load(dt + token * DT_STRIDES[0] + head * DT_STRIDES[1], mask=mine, other=0)
    inputs = tl.load(B + token * B_STRIDES[0] + group * B_STRIDES[1] + channel, mask=known, other=0)
    return size, inputs, tl.load(C + token * C_STRIDES[0] + group * C_STRIDES[1] + channel, mask=known, other=0)


@triton.jit
def _load_entries(
    log_B,
    log_dt,
    log_G,
    place,
    start,
    end,
    channel,
    in_group,
    in_N,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
):
    """Load Bs, steps and decay sums from places of a token log; zeros outside `start` to `end`."""
    there = (place >= start) & (place < end)
    Bs = log_B + (place * (GROUPS * N))[:, None] + channel[None, :]
    Bs = tl.load(Bs, mask=there[:, None] & in_N[None, :], other=0).to(tl.float32)
    held, of_heads = there[:, None] & in_group[None, :], (place * HEADS)[:, None]
    sizes = tl.load(log_dt[None, :] + of_heads, mask=held, other=0)
    return Bs, sizes, tl.load(log_G[None, :] + of_heads, mask=held, other=0)


@triton.jit
def _store_scores(scores, lane, end, Bs, sizes, Gs, asked, G, in_group):
    """Store scores of a token's C with some lanes of its path. Lanes from `end` on, which later tokens may use, get
    zeros."""
    met = tl.sum(Bs * asked[None, :], axis=1)[:, None] * tl.exp2(G[None, :] - Gs) * sizes
    met = tl.where((lane < end)[:, None], met, 0.0)
    tl.store(scores[None, :] + lane[:, None], met, mask=tl.broadcast_to(in_group[None, :], met.shape))


@triton.jit
def _enter(
    step,
    raw,
    reads,
    G,
    rate,
    bias,
    skip,
    dt_min,
    dt_max,
    log_B,
    log_dt,
    log_G,
    vector,
    scalar,
    there,
    in_N,
    in_group,
    of_group,
):
    """Log a token after decays G and store its vector and scalars. Return its C in fp32 and G after it."""
    own, asked, mine = raw.to(tl.float32), reads.to(tl.float32), tl.where(there, in_group, False)
    size = tl.minimum(tl.maximum(softplus(step.to(tl.float32) + bias), dt_min), dt_max)
    G += tl.maximum(size * rate, LEAST_DECAY)
    tl.store(log_B, raw, mask=tl.where(there, in_N, False))  # in every program of the group, since it reads B again
    tl.store(log_dt, size, mask=mine)
    tl.store(log_G, G, mask=mine)
    tl.store(vector, asked, mask=of_group)
    tl.store(scalar, tl.exp2(G), mask=in_group)
    tl.store(scalar + 1, tl.sum(own * asked, axis=0) * size + skip, mask=in_group)
    return asked, G


@triton.jit
def prepare(
    dt,
    A,
    B,
    C,
    D,
    dt_bias,
    log_B,
    log_dt,
    log_G,
    scores,
    vectors,
    scalars,
    row,
    program,
    length,
    start,
    end,
    depths,
    tokens_per_decode,
    dt_min,
    dt_max,
    DT_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """Log the Bs and steps of a batch row's new tokens, for BLOCK_HEADS heads of one group.

    Store every token's C in fp32 in `vectors` [F, G, N], and its scores with the log in `scores` [F, H, 16]. The order
    is as in `common.delta_prepare`.
    """
    SHARING: tl.constexpr = HEADS // GROUPS
    TILES: tl.constexpr = (SHARING + BLOCK_HEADS - 1) // BLOCK_HEADS
    LANES: tl.constexpr = WINDOW if ONE_TOKEN else WINDOW // 2
    group, tile = program // TILES, program % TILES
    channel = tl.arange(0, BLOCK_N)
    place_in_group = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head, in_group = group * SHARING + place_in_group, place_in_group < SHARING
    in_N = channel < N
    of_group = tl.where(tile == 0, in_N, False)  # one program stores the vectors of the whole group
    log_B += group * N
    log_dt += head
    log_G += head
    first_token = row.to(tl.int64) * tokens_per_decode
    scores += (first_token * HEADS + head) * WINDOW
    vectors += (first_token * GROUPS + group) * N + channel
    scalars += (first_token * HEADS + head) * SCALARS
    step, raw, reads = _load_token(
        dt, B, C, first_token, True, head, group, channel, in_group, in_N, DT_STRIDES, B_STRIDES, C_STRIDES
    )
    first = start // LANES * LANES
    G = tl.load(log_G + (end - 1) * HEADS, mask=tl.where(end > start, in_group, False), other=0)
    rate = tl.load(A + head, mask=in_group, other=0).to(tl.float32) * LOG2_E
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + head, mask=in_group, other=0).to(tl.float32)
    skip = 0.0 if D is None else tl.load(D + head, mask=in_group, other=0).to(tl.float32)
    if ONE_TOKEN:
        lane = first + tl.arange(0, LANES)
        Bs, sizes, Gs = _load_entries(log_B, log_dt, log_G, lane, start, end, channel, in_group, in_N, HEADS, GROUPS, N)
        asked, G = _enter(
            step, raw, reads, G, rate, bias, skip, dt_min, dt_max,
            log_B + end * (GROUPS * N) + channel, log_dt + end * HEADS, log_G + end * HEADS,
            vectors, scalars, length > 0, in_N, in_group, of_group,
        )  # fmt: skip
        _store_scores(scores, lane, end, Bs, sizes, Gs, asked, G, in_group)
    else:
        above = -1
        for t in range(length):
            here, depth = end + t, depth_of(depths, t)
            next_step, next_raw, next_reads = _load_token(
                dt, B, C, first_token + t + 1, t + 1 < tokens_per_decode, head, group, channel, in_group, in_N,
                DT_STRIDES, B_STRIDES, C_STRIDES,
            )  # fmt: skip
            if depth <= above:  # a branch: decays continue from its parent
                tl.debug_barrier()  # other threads may have stored them
                place = parent_place(depths, t, end)
                G = tl.load(log_G + place * HEADS, mask=tl.where(place >= start, in_group, False), other=0)
            above = depth
            _, G = _enter(
                step, raw, reads, G, rate, bias, skip, dt_min, dt_max,
                log_B + here * (GROUPS * N) + channel, log_dt + here * HEADS, log_G + here * HEADS,
                vectors + t * (GROUPS * N), scalars + t * (HEADS * SCALARS), True, in_N, in_group,
                of_group,
            )  # fmt: skip
            every = tl.arange(0, WINDOW)[:, None]
            unmet = ((every < first) | (every >= end + depth)) & in_group[None, :]
            place = (scores + t * (HEADS * WINDOW))[None, :] + every
            tl.store(place, tl.zeros([WINDOW, BLOCK_HEADS], tl.float32), mask=unmet)
            step, raw, reads = next_step, next_raw, next_reads
        tl.debug_barrier()
        for block in range(first, end + length - 1, LANES):
            lane = block + tl.arange(0, LANES)
            place, above = lane, -1
            Bs, sizes, Gs = _load_entries(
                log_B, log_dt, log_G, place, start, end + length, channel, in_group, in_N, HEADS, GROUPS, N
            )
            for t in range(length):
                depth = depth_of(depths, t)
                if depth <= above:  # a branch: lanes hold other tokens from here on
                    place = tl.where(lane >= end + depth, lane + (t - depth), place)
                    Bs, sizes, Gs = _load_entries(
                        log_B, log_dt, log_G, place, start, end + length, channel, in_group, in_N, HEADS, GROUPS, N
                    )
                above = depth
                if block < end + depth:
                    _, _, reads = _load_token(
                        dt, B, C, first_token + t, True, head, group, channel, in_group, in_N,
                        DT_STRIDES, B_STRIDES, C_STRIDES,
                    )  # fmt: skip
                    G = tl.load(log_G + (end + t) * HEADS, mask=in_group, other=0)
                    score = scores + t * (HEADS * WINDOW)
                    _store_scores(score, lane, end + depth, Bs, sizes, Gs, reads.to(tl.float32), G, in_group)
