"""Prepare a row's new tokens for decode."""

from __future__ import annotations

import triton
import triton.language as tl

from .delta_rule import NORM_EPS, log2_decay, normalized
from .log import LEAST_DECAY, WINDOW, depth_of, parent_place

SCALARS = tl.constexpr(3)  # beta, query times key, decay


@triton.jit
def _load_token(
    q,
    k,
    a,
    b,
    token,
    computed,
    head,
    value_head,
    part,
    channel,
    in_K,
    in_part,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    A_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Load a token's raw query, key, gate and beta, or zeros."""
    known, mine = tl.where(computed, in_K, False), tl.where(computed, in_part, False)
    query = tl.load(q + token * Q_STRIDES[0] + head * Q_STRIDES[1] + channel, mask=known, other=0)
    key = tl.load(k + token * K_STRIDES[0] + head * K_STRIDES[1] + channel, mask=known, other=0)
    gate = a + token * A_STRIDES[0] + (head * A_STRIDES[1] + channel if CHANNELS else part * A_STRIDES[1])
    gate = tl.load(gate, mask=mine, other=0)
    beta = b + token * B_STRIDES[0] + value_head * B_STRIDES[1]
    return query, key, gate, tl.load(beta, mask=tl.where(computed, value_head >= 0, False), other=0)


@triton.jit
def _load_entries(
    log_k,
    log_norm,
    log_G,
    place,
    start,
    end,
    channel,
    in_K,
    in_part,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
):
    """Load normalised keys and decay sums; zeros outside the log."""
    there = (place >= start) & (place < end)
    norms = tl.load(log_norm + place * HEADS, mask=there, other=0)
    keys = log_k + (place * (HEADS * K))[:, None] + channel[None, :]
    keys = tl.load(keys, mask=there[:, None] & in_K[None, :], other=0).to(tl.float32) * norms[:, None]
    Gs = log_G[None, :] + (place * PARTS)[:, None]
    return keys, tl.load(Gs, mask=there[:, None] & in_part[None, :], other=0)


@triton.jit
def _store_scores(scores, lane, end, keys, Gs, key, met_by, G, CHANNELS: tl.constexpr):
    """Store a token's products with its path's decayed keys; zeros from lane `end` on."""
    before = lane < end
    decays = tl.exp2(G[None, :] - Gs)
    if CHANNELS:
        met = keys * decays
        tl.store(scores + lane, tl.where(before, tl.sum(met * key[None, :], axis=1), 0.0))
        tl.store(scores + WINDOW + lane, tl.where(before, tl.sum(met * met_by[None, :], axis=1), 0.0))
    else:
        place, before = scores[None, :] + lane[:, None], before[:, None]
        tl.store(place, tl.where(before, tl.sum(keys * key[None, :], axis=1)[:, None] * decays, 0.0))
        tl.store(place + WINDOW, tl.where(before, tl.sum(keys * met_by[None, :], axis=1)[:, None] * decays, 0.0))


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
def _enter(
    query,
    raw,
    gate,
    beta,
    G,
    rate,
    bias,
    beta_scale,
    log_k,
    log_norm,
    log_G,
    vector,
    scalar,
    there,
    in_K,
    in_part,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Log a token; G is the decay sum before it."""
    key = raw.to(tl.float32)
    norm = tl.rsqrt(tl.sum(key * key, axis=0) + NORM_EPS)
    key *= norm
    met_by = normalized(query.to(tl.float32)) * K**-0.5
    G += tl.maximum(log2_decay(gate.to(tl.float32), rate, bias), LEAST_DECAY)
    tl.store(log_k, raw, mask=tl.where(there, in_K, False))
    tl.store(log_norm, norm, mask=there)
    tl.store(log_G, G, mask=tl.where(there, in_part, False))
    total, own = tl.exp2(G), tl.sum(key * met_by, axis=0)
    tl.store(scalar, beta_scale / (1 + tl.exp(-beta.to(tl.float32))))
    if CHANNELS:
        tl.store(vector, key * total, mask=in_K)
        tl.store(vector + K, met_by * total, mask=in_K)
        tl.store(scalar + 1, own)
        tl.store(scalar + 2, 1.0)
    else:
        tl.store(vector, key, mask=in_K)
        tl.store(vector + K, met_by, mask=in_K)
        tl.store(scalar + 1, own + tl.zeros_like(total))
        tl.store(scalar + 2, total)
    return key, met_by, G


@triton.jit
def prepare(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    log_k,
    log_norm,
    log_G,
    scores,
    vectors,
    scalars,
    row,
    head,
    length,
    start,
    end,
    depths,
    tokens_per_decode,
    beta_scale,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    A_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """Log keys and decays of a row's new tokens for one key head.

    Each key and query go to `vectors` [F, H, 2, K], their products with the path to `scores` [F, HV, 2, 16]. The path's
    token of depth d has lane end + d. All tokens are logged before parts of LANES entries are met.
    """
    GROUP: tl.constexpr = VALUE_HEADS // HEADS
    PARTS: tl.constexpr = VALUE_HEADS * K if CHANNELS else VALUE_HEADS
    LANES: tl.constexpr = WINDOW if ONE_TOKEN and not CHANNELS else WINDOW // 2
    channel = tl.arange(0, BLOCK_K)
    in_K = channel < K
    log_k += head * K
    log_norm += head
    # A part has its own decay. The last value head is repeated up to a power of 2.
    if CHANNELS:
        value_head = head
        part, in_part = head * K + channel, in_K
    else:
        value_head = head * GROUP + tl.arange(0, BLOCK_GROUP)
        if BLOCK_GROUP > GROUP:
            value_head = tl.minimum(value_head, head * GROUP + GROUP - 1)
        part, in_part = value_head, value_head < VALUE_HEADS
    log_G += part
    first_token = row.to(tl.int64) * tokens_per_decode
    scores += (first_token * VALUE_HEADS + value_head) * (2 * WINDOW)
    vectors += (first_token * HEADS + head) * (2 * K) + channel
    scalars += (first_token * VALUE_HEADS + value_head) * SCALARS
    query, raw, gate, beta = _load_token(
        q, k, a, b, first_token, True, head, value_head, part, channel, in_K, in_part,
        Q_STRIDES, K_STRIDES, A_STRIDES, B_STRIDES, CHANNELS,
    )  # fmt: skip
    first = start // LANES * LANES
    G = tl.load(log_G + (end - 1) * PARTS, mask=tl.where(end > start, in_part, False), other=0)
    rate = tl.load(A_log + value_head).to(tl.float32)
    bias = tl.load(dt_bias + part, mask=in_part, other=0).to(tl.float32)
    if ONE_TOKEN:
        lane = first + tl.arange(0, LANES)
        keys, Gs = _load_entries(log_k, log_norm, log_G, lane, start, end, channel, in_K, in_part, HEADS, PARTS, K)
        key, met_by, G = _enter(
            query, raw, gate, beta, G, rate, bias, beta_scale,
            log_k + end * (HEADS * K) + channel, log_norm + end * HEADS, log_G + end * PARTS,
            vectors, scalars, length > 0, in_K, in_part, K, CHANNELS,
        )  # fmt: skip
        if LANES == WINDOW:
            _store_scores(scores, lane, end, keys, Gs, key, met_by, G, CHANNELS)
        else:
            _clear_scores(scores, first, end, CHANNELS)
            for _ in range(first, end, LANES):
                _store_scores(scores, lane, end, keys, Gs, key, met_by, G, CHANNELS)
                lane += LANES
                keys, Gs = _load_entries(
                    log_k, log_norm, log_G, lane, start, end, channel, in_K, in_part, HEADS, PARTS, K
                )
    else:
        above = -1
        for t in range(length):
            here, depth = end + t, depth_of(depths, t)
            next_query, next_raw, next_gate, next_beta = _load_token(
                q, k, a, b, first_token + t + 1, t + 1 < tokens_per_decode, head, value_head, part, channel, in_K,
                in_part, Q_STRIDES, K_STRIDES, A_STRIDES, B_STRIDES, CHANNELS,
            )  # fmt: skip
            if depth <= above:  # a branch
                tl.debug_barrier()  # for stores of other threads
                place = parent_place(depths, t, end)
                G = tl.load(log_G + place * PARTS, mask=tl.where(place >= start, in_part, False), other=0)
            above = depth
            _, _, G = _enter(
                query, raw, gate, beta, G, rate, bias, beta_scale,
                log_k + here * (HEADS * K) + channel, log_norm + here * HEADS, log_G + here * PARTS,
                vectors + t * (HEADS * 2 * K), scalars + t * (VALUE_HEADS * SCALARS), True, in_K, in_part, K, CHANNELS,
            )  # fmt: skip
            _clear_scores(scores + t * (VALUE_HEADS * 2 * WINDOW), first, end + depth, CHANNELS)
            query, raw, gate, beta = next_query, next_raw, next_gate, next_beta
        tl.debug_barrier()
        for block in range(first, end + length - 1, LANES):
            lane = block + tl.arange(0, LANES)
            place, above = lane, -1
            keys, Gs = _load_entries(
                log_k, log_norm, log_G, place, start, end + length, channel, in_K, in_part, HEADS, PARTS, K
            )
            for t in range(length):
                depth = depth_of(depths, t)
                if depth <= above:  # a branch
                    place = tl.where(lane >= end + depth, lane + (t - depth), place)
                    keys, Gs = _load_entries(
                        log_k, log_norm, log_G, place, start, end + length, channel, in_K, in_part, HEADS, PARTS, K
                    )
                above = depth
                if block < end + depth:
                    query, raw, _, _ = _load_token(
                        q, k, a, b, first_token + t, True, head, value_head, part, channel, in_K, in_part,
                        Q_STRIDES, K_STRIDES, A_STRIDES, B_STRIDES, CHANNELS,
                    )  # fmt: skip
                    key = raw.to(tl.float32) * tl.load(log_norm + (end + t) * HEADS)
                    met_by = normalized(query.to(tl.float32)) * K**-0.5
                    G = tl.load(log_G + (end + t) * PARTS, mask=in_part, other=0)
                    score = scores + t * (VALUE_HEADS * 2 * WINDOW)
                    _store_scores(score, lane, end + depth, keys, Gs, key, met_by, G, CHANNELS)
