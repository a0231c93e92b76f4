"""Prepare a row's new tokens for decode."""

from __future__ import annotations

import triton
import triton.language as tl

from .delta_rule import NORM_EPS, log2_decay, normalized
from .log import LEAST_DECAY, WINDOW, depth_of, parent_place
from .structs import aggregate

SCALARS = tl.constexpr(3)  # beta, query times key, decay


@aggregate
class Shape:
    """Hold constants; with CHANNELS a key channel has a decay."""

    HEADS: tl.constexpr
    VALUE_HEADS: tl.constexpr
    K: tl.constexpr
    BLOCK_K: tl.constexpr
    BLOCK_GROUP: tl.constexpr
    CHANNELS: tl.constexpr
    ONE_TOKEN: tl.constexpr


@aggregate
class Inputs:
    q: tl.tensor
    k: tl.tensor
    a: tl.tensor
    b: tl.tensor
    Q_STRIDES: tl.constexpr
    K_STRIDES: tl.constexpr
    A_STRIDES: tl.constexpr
    B_STRIDES: tl.constexpr


@aggregate
class Log:
    """Hold raw keys, inverse norms and decay sums."""

    k: tl.tensor
    norm: tl.tensor
    G: tl.tensor


@aggregate
class Scratch:
    """Hold `scores` [F, HV, 2, 16], `vectors` [F, H, 2, K] and `scalars` [F, HV, SCALARS]."""

    scores: tl.tensor
    vectors: tl.tensor
    scalars: tl.tensor


@aggregate
class KeyHead:
    """Hold a key head's value heads and channels; a part has its own decay."""

    head: tl.tensor
    value_head: tl.tensor
    part: tl.tensor
    channel: tl.tensor
    in_K: tl.tensor
    in_part: tl.tensor


@aggregate
class Gates:
    rate: tl.tensor
    bias: tl.tensor
    beta_scale: tl.tensor


@aggregate
class Token:
    query: tl.tensor
    key: tl.tensor
    gate: tl.tensor
    beta: tl.tensor


@aggregate
class Entries:
    """Hold normalised keys and decay sums."""

    keys: tl.tensor
    Gs: tl.tensor


@triton.jit
def _load_token(inputs, own, token, computed, CHANNELS: tl.constexpr):
    known, mine = tl.where(computed, own.in_K, False), tl.where(computed, own.in_part, False)
    q = inputs.q + token * inputs.Q_STRIDES[0] + own.head * inputs.Q_STRIDES[1] + own.channel
    query = tl.load(q, mask=known, other=0)
    k = inputs.k + token * inputs.K_STRIDES[0] + own.head * inputs.K_STRIDES[1] + own.channel
    key = tl.load(k, mask=known, other=0)
    a = inputs.a + token * inputs.A_STRIDES[0]
    a += own.head * inputs.A_STRIDES[1] + own.channel if CHANNELS else own.part * inputs.A_STRIDES[1]
    gate = tl.load(a, mask=mine, other=0)
    b = inputs.b + token * inputs.B_STRIDES[0] + own.value_head * inputs.B_STRIDES[1]
    return Token(query, key, gate, tl.load(b, mask=tl.where(computed, own.value_head >= 0, False), other=0))


@triton.jit
def _load_entries(log, own, place, start, end, shape):
    there = (place >= start) & (place < end)
    norms = tl.load(log.norm + place * shape.HEADS, mask=there, other=0)
    keys = log.k + (place * (shape.HEADS * shape.K))[:, None] + own.channel[None, :]
    keys = tl.load(keys, mask=there[:, None] & own.in_K[None, :], other=0).to(tl.float32) * norms[:, None]
    Gs = log.G[None, :] + (place * (shape.VALUE_HEADS * shape.K if shape.CHANNELS else shape.VALUE_HEADS))[:, None]
    return Entries(keys, tl.load(Gs, mask=there[:, None] & own.in_part[None, :], other=0))


@triton.jit
def _store_scores(scores, lane, end, entries, key, met_by, G, CHANNELS: tl.constexpr):
    """Store a token's products with decayed keys; zeros from lane `end` on."""
    before = lane < end
    decays = tl.exp2(G[None, :] - entries.Gs)
    if CHANNELS:
        met = entries.keys * decays
        tl.store(scores + lane, tl.where(before, tl.sum(met * key[None, :], axis=1), 0.0))
        tl.store(scores + WINDOW + lane, tl.where(before, tl.sum(met * met_by[None, :], axis=1), 0.0))
    else:
        place, before = scores[None, :] + lane[:, None], before[:, None]
        tl.store(place, tl.where(before, tl.sum(entries.keys * key[None, :], axis=1)[:, None] * decays, 0.0))
        met = tl.sum(entries.keys * met_by[None, :], axis=1)[:, None]
        tl.store(place + WINDOW, tl.where(before, met * decays, 0.0))


@triton.jit
def _clear_scores(scores, first, end, CHANNELS: tl.constexpr):
    """Clear lanes outside `first` to `end`."""
    lane = tl.arange(0, WINDOW)
    if CHANNELS:
        place, unmet = scores + lane, (lane < first) | (lane >= end)
    else:
        place = scores[None, :] + lane[:, None]
        unmet = tl.broadcast_to(((lane < first) | (lane >= end))[:, None], place.shape)
    tl.store(place, tl.zeros(place.shape, tl.float32), mask=unmet)
    tl.store(place + WINDOW, tl.zeros(place.shape, tl.float32), mask=unmet)


@triton.jit
def _enter(token, gates, G, log, own, vector, scalar, there, K: tl.constexpr, CHANNELS: tl.constexpr):
    """Log a token; return normalised key and query, and the decay sum after it."""
    key = token.key.to(tl.float32)
    norm = tl.rsqrt(tl.sum(key * key, axis=0) + NORM_EPS)
    key *= norm
    met_by = normalized(token.query.to(tl.float32)) * K**-0.5
    G += tl.maximum(log2_decay(token.gate.to(tl.float32), gates.rate, gates.bias), LEAST_DECAY)
    tl.store(log.k, token.key, mask=tl.where(there, own.in_K, False))
    tl.store(log.norm, norm, mask=there)
    tl.store(log.G, G, mask=tl.where(there, own.in_part, False))
    total, product = tl.exp2(G), tl.sum(key * met_by, axis=0)
    tl.store(scalar, gates.beta_scale / (1 + tl.exp(-token.beta.to(tl.float32))))
    if CHANNELS:
        tl.store(vector, key * total, mask=own.in_K)
        tl.store(vector + K, met_by * total, mask=own.in_K)
        tl.store(scalar + 1, product)
        tl.store(scalar + 2, 1.0)
    else:
        tl.store(vector, key, mask=own.in_K)
        tl.store(vector + K, met_by, mask=own.in_K)
        tl.store(scalar + 1, product + tl.zeros_like(total))
        tl.store(scalar + 2, total)
    return key, met_by, G


@triton.jit
def _log_at(log, own, place, shape):
    PARTS: tl.constexpr = shape.VALUE_HEADS * shape.K if shape.CHANNELS else shape.VALUE_HEADS
    k = log.k + place * (shape.HEADS * shape.K) + own.channel
    return Log(k, log.norm + place * shape.HEADS, log.G + place * PARTS)


@triton.jit
def prepare(inputs, A_log, dt_bias, beta_scale, log, scratch, row, head, shape):
    """Log keys and decays of a row's new tokens for one key head, and fill `scratch`.

    Vectors are keys and queries, scores their products with the path. The path's token of depth d has lane end + d.
    """
    HEADS: tl.constexpr = shape.HEADS
    VALUE_HEADS: tl.constexpr = shape.VALUE_HEADS
    K: tl.constexpr = shape.K
    CHANNELS: tl.constexpr = shape.CHANNELS
    GROUP: tl.constexpr = VALUE_HEADS // HEADS
    PARTS: tl.constexpr = VALUE_HEADS * K if CHANNELS else VALUE_HEADS
    LANES: tl.constexpr = WINDOW if shape.ONE_TOKEN and not CHANNELS else WINDOW // 2
    start, end, length, depths = row.start, row.end, row.length, row.depths
    channel = tl.arange(0, shape.BLOCK_K)
    in_K = channel < K
    log_k = log.k + head * K
    log_norm = log.norm + head
    # The last value head is repeated up to a power of 2.
    if CHANNELS:
        value_head = head
        part, in_part = head * K + channel, in_K
    else:
        value_head = head * GROUP + tl.arange(0, shape.BLOCK_GROUP)
        if shape.BLOCK_GROUP > GROUP:
            value_head = tl.minimum(value_head, head * GROUP + GROUP - 1)
        part, in_part = value_head, value_head < VALUE_HEADS
    log = Log(log_k, log_norm, log.G + part)
    own = KeyHead(head, value_head, part, channel, in_K, in_part)
    first_token = row.row.to(tl.int64) * row.tokens
    scores = scratch.scores + (first_token * VALUE_HEADS + value_head) * (2 * WINDOW)
    vectors = scratch.vectors + (first_token * HEADS + head) * (2 * K) + channel
    scalars = scratch.scalars + (first_token * VALUE_HEADS + value_head) * SCALARS
    token = _load_token(inputs, own, first_token, True, CHANNELS)
    first = start // LANES * LANES
    G = tl.load(log.G + (end - 1) * PARTS, mask=tl.where(end > start, in_part, False), other=0)
    rate = tl.load(A_log + value_head).to(tl.float32)
    gates = Gates(rate, tl.load(dt_bias + part, mask=in_part, other=0).to(tl.float32), beta_scale)
    if shape.ONE_TOKEN:
        lane = first + tl.arange(0, LANES)
        entries = _load_entries(log, own, lane, start, end, shape)
        place = _log_at(log, own, end, shape)
        key, met_by, G = _enter(token, gates, G, place, own, vectors, scalars, length > 0, K, CHANNELS)
        if LANES == WINDOW:
            _store_scores(scores, lane, end, entries, key, met_by, G, CHANNELS)
        else:
            _clear_scores(scores, first, end, CHANNELS)
            for _ in range(first, end, LANES):
                _store_scores(scores, lane, end, entries, key, met_by, G, CHANNELS)
                lane += LANES
                entries = _load_entries(log, own, lane, start, end, shape)
    else:
        above = -1
        for t in range(length):
            here, depth = end + t, depth_of(depths, t)
            following = _load_token(inputs, own, first_token + t + 1, t + 1 < row.tokens, CHANNELS)
            if depth <= above:  # a branch
                tl.debug_barrier()  # for stores of other threads
                place = parent_place(depths, t, end)
                G = tl.load(log.G + place * PARTS, mask=tl.where(place >= start, in_part, False), other=0)
            above = depth
            vector, scalar = vectors + t * (HEADS * 2 * K), scalars + t * (VALUE_HEADS * SCALARS)
            _, _, G = _enter(token, gates, G, _log_at(log, own, here, shape), own, vector, scalar, True, K, CHANNELS)
            _clear_scores(scores + t * (VALUE_HEADS * 2 * WINDOW), first, end + depth, CHANNELS)
            token = following
        tl.debug_barrier()
        for block in range(first, end + length - 1, LANES):
            lane = block + tl.arange(0, LANES)
            place, above = lane, -1
            entries = _load_entries(log, own, place, start, end + length, shape)
            for t in range(length):
                depth = depth_of(depths, t)
                if depth <= above:  # a branch
                    place = tl.where(lane >= end + depth, lane + (t - depth), place)
                    entries = _load_entries(log, own, place, start, end + length, shape)
                above = depth
                if block < end + depth:
                    token = _load_token(inputs, own, first_token + t, True, CHANNELS)
                    key = token.key.to(tl.float32) * tl.load(log.norm + (end + t) * HEADS)
                    met_by = normalized(token.query.to(tl.float32)) * K**-0.5
                    G = tl.load(log.G + (end + t) * PARTS, mask=in_part, other=0)
                    score = scores + t * (VALUE_HEADS * 2 * WINDOW)
                    _store_scores(score, lane, end + depth, entries, key, met_by, G, CHANNELS)
