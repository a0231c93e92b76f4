"""Prepare the new tokens of a decode row before its states are read."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.decays import LOG2_E, softplus
from ..common.log import LEAST_DECAY, WINDOW, depth_of, parent_place
from ..common.structs import aggregate

SCALARS = tl.constexpr(2)  # the state's decay, the factor of x


@aggregate
class Shape:
    """Hold a launch's constants."""

    HEADS: int
    GROUPS: int
    P: int
    N: int
    BLOCK_N: int
    BLOCK_HEADS: int
    ONE_TOKEN: bool


@aggregate
class Inputs:
    """Hold tokens' inputs, with strides, and heads' parameters."""

    dt: tl.tensor
    A: tl.tensor
    B: tl.tensor
    C: tl.tensor
    D: tl.tensor | None
    dt_bias: tl.tensor | None
    dt_min: tl.tensor
    dt_max: tl.tensor
    DT_STRIDES: tuple[int, ...]
    B_STRIDES: tuple[int, ...]
    C_STRIDES: tuple[int, ...]


@aggregate
class Log:
    """Hold a token log's Bs, step sizes and decay sums, or entries of it."""

    B: tl.tensor
    dt: tl.tensor
    G: tl.tensor


@aggregate
class Scratch:
    """Hold scores [F, H, 16], vectors C [F, G, N] and scalars [F, H, 2] in fp32."""

    scores: tl.tensor
    vectors: tl.tensor
    scalars: tl.tensor


@aggregate
class Lanes:
    """Hold a program's heads, all of one group, and channels; `of_group` in the group's first program alone."""

    group: tl.tensor
    head: tl.tensor
    in_group: tl.tensor
    channel: tl.tensor
    in_N: tl.tensor
    of_group: tl.tensor


@aggregate
class Token:
    """Hold raw step sizes [BLOCK_HEADS], B and C [BLOCK_N]."""

    dt: tl.tensor
    B: tl.tensor
    C: tl.tensor


@aggregate
class Rates:
    """Hold heads' parameters and bounds of step sizes."""

    decay: tl.tensor
    bias: tl.tensor
    skip: tl.tensor
    dt_min: tl.tensor
    dt_max: tl.tensor


@triton.jit
def _load_token(inputs, lanes, token, computed):
    """Return a token; zeros unless it is computed."""
    known, mine = tl.where(computed, lanes.in_N, False), tl.where(computed, lanes.in_group, False)
    size = inputs.dt + token * inputs.DT_STRIDES[0] + lanes.head * inputs.DT_STRIDES[1]
    size = tl.load(size, mask=mine, other=0)
    B = inputs.B + token * inputs.B_STRIDES[0] + lanes.group * inputs.B_STRIDES[1] + lanes.channel
    B = tl.load(B, mask=known, other=0)
    C = inputs.C + token * inputs.C_STRIDES[0] + lanes.group * inputs.C_STRIDES[1] + lanes.channel
    return Token(size, B, tl.load(C, mask=known, other=0))


@triton.jit
def _load_entries(log, lanes, place, start, end, shape):
    """Return entries of a log; zeros outside `start` to `end`."""
    there = (place >= start) & (place < end)
    Bs = log.B + (place * (shape.GROUPS * shape.N))[:, None] + lanes.channel[None, :]
    Bs = tl.load(Bs, mask=there[:, None] & lanes.in_N[None, :], other=0).to(tl.float32)
    held, of_heads = there[:, None] & lanes.in_group[None, :], (place * shape.HEADS)[:, None]
    steps = tl.load(log.dt[None, :] + of_heads, mask=held, other=0)
    return Log(Bs, steps, tl.load(log.G[None, :] + of_heads, mask=held, other=0))


@triton.jit
def _store_scores(scores, lane, end, entries, C, G, in_group):
    """Store a token's scores with its path's entries; zeros from lane `end` on."""
    met = tl.sum(entries.B * C[None, :], axis=1)[:, None] * tl.exp2(G[None, :] - entries.G) * entries.dt
    met = tl.where((lane < end)[:, None], met, 0.0)
    tl.store(scores[None, :] + lane[:, None], met, mask=tl.broadcast_to(in_group[None, :], met.shape))


@triton.jit
def _enter(token, t, place, G, rates, lanes, log, scratch, row, shape):
    """Log token t; G is the decay sum before it."""
    log_B = log.B + place * (shape.GROUPS * shape.N) + lanes.channel
    log_dt, log_G = log.dt + place * shape.HEADS, log.G + place * shape.HEADS
    vector = scratch.vectors + t * (shape.GROUPS * shape.N)
    scalar = scratch.scalars + t * (shape.HEADS * SCALARS)
    there = t < row.length
    B, C, mine = token.B.to(tl.float32), token.C.to(tl.float32), tl.where(there, lanes.in_group, False)
    size = tl.minimum(tl.maximum(softplus(token.dt.to(tl.float32) + rates.bias), rates.dt_min), rates.dt_max)
    G += tl.maximum(size * rates.decay, LEAST_DECAY)
    tl.store(log_B, token.B, mask=tl.where(there, lanes.in_N, False))  # in every program, which reads it again
    tl.store(log_dt, size, mask=mine)
    tl.store(log_G, G, mask=mine)
    tl.store(vector, C, mask=lanes.of_group)
    tl.store(scalar, tl.exp2(G), mask=lanes.in_group)
    tl.store(scalar + 1, tl.sum(B * C, axis=0) * size + rates.skip, mask=lanes.in_group)
    return C, G


@triton.jit
def prepare(inputs, log, scratch, row, program, shape):
    """Log a row's new tokens and store their scores for BLOCK_HEADS heads of one group.

    The order is as in `common.delta_prepare`.
    """
    BLOCK_HEADS: tl.constexpr = shape.BLOCK_HEADS
    ONE_TOKEN: tl.constexpr = shape.ONE_TOKEN
    SHARING: tl.constexpr = shape.HEADS // shape.GROUPS
    TILES: tl.constexpr = (SHARING + BLOCK_HEADS - 1) // BLOCK_HEADS
    LANES: tl.constexpr = WINDOW if ONE_TOKEN else WINDOW // 2
    group, tile = program // TILES, program % TILES
    channel = tl.arange(0, shape.BLOCK_N)
    place_in_group = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head, in_group = group * SHARING + place_in_group, place_in_group < SHARING
    in_N = channel < shape.N
    lanes = Lanes(group, head, in_group, channel, in_N, tl.where(tile == 0, in_N, False))
    log = Log(log.B + group * shape.N, log.dt + head, log.G + head)
    first_token = row.row.to(tl.int64) * row.tokens
    scratch = Scratch(
        scratch.scores + (first_token * shape.HEADS + head) * WINDOW,
        scratch.vectors + (first_token * shape.GROUPS + group) * shape.N + channel,
        scratch.scalars + (first_token * shape.HEADS + head) * SCALARS,
    )
    token = _load_token(inputs, lanes, first_token, True)
    first = row.start // LANES * LANES
    logged = tl.where(row.end > row.start, in_group, False)
    G = tl.load(log.G + (row.end - 1) * shape.HEADS, mask=logged, other=0)
    decay = tl.load(inputs.A + head, mask=in_group, other=0).to(tl.float32) * LOG2_E
    bias = 0.0 if inputs.dt_bias is None else tl.load(inputs.dt_bias + head, mask=in_group, other=0).to(tl.float32)
    skip = 0.0 if inputs.D is None else tl.load(inputs.D + head, mask=in_group, other=0).to(tl.float32)
    rates = Rates(decay, bias, skip, inputs.dt_min, inputs.dt_max)
    if ONE_TOKEN:
        lane = first + tl.arange(0, LANES)
        entries = _load_entries(log, lanes, lane, row.start, row.end, shape)
        C, G = _enter(token, 0, row.end, G, rates, lanes, log, scratch, row, shape)
        _store_scores(scratch.scores, lane, row.end, entries, C, G, in_group)
    else:
        above = -1
        for t in range(row.length):
            here, depth = row.end + t, depth_of(row.depths, t)
            following = _load_token(inputs, lanes, first_token + t + 1, t + 1 < row.tokens)
            if depth <= above:  # a branch
                tl.debug_barrier()  # for stores of other threads
                place = parent_place(row.depths, t, row.end)
                G = tl.load(log.G + place * shape.HEADS, mask=tl.where(place >= row.start, in_group, False), other=0)
            above = depth
            _, G = _enter(token, t, here, G, rates, lanes, log, scratch, row, shape)
            every = tl.arange(0, WINDOW)[:, None]
            unmet = ((every < first) | (every >= row.end + depth)) & in_group[None, :]
            place = (scratch.scores + t * (shape.HEADS * WINDOW))[None, :] + every
            tl.store(place, tl.zeros([WINDOW, BLOCK_HEADS], tl.float32), mask=unmet)
            token = following
        tl.debug_barrier()
        new_end = row.end + row.length
        for block in range(first, new_end - 1, LANES):
            lane = block + tl.arange(0, LANES)
            place, above = lane, -1
            entries = _load_entries(log, lanes, place, row.start, new_end, shape)
            for t in range(row.length):
                depth = depth_of(row.depths, t)
                if depth <= above:  # a branch
                    place = tl.where(lane >= row.end + depth, lane + (t - depth), place)
                    entries = _load_entries(log, lanes, place, row.start, new_end, shape)
                above = depth
                if block < row.end + depth:
                    token = _load_token(inputs, lanes, first_token + t, True)
                    G = tl.load(log.G + (row.end + t) * shape.HEADS, mask=in_group, other=0)
                    scores = scratch.scores + t * (shape.HEADS * WINDOW)
                    _store_scores(scores, lane, row.end + depth, entries, token.C.to(tl.float32), G, in_group)
