"""Gated delta rule and Kimi Delta Attention over the decode rows of a batch and their token logs: two Triton launches.

KDA is the one whose every key channel has a decay of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from .chunks import row_and_tile
from .delta_rule import NORM_EPS, log2_decay, normalized
from .launch import Launcher, index_pointers
from .layout import layer_strides, power_of_2, slot_elements, slot_stride
from .log import (
    DECODE_ARRAYS,
    LEAST_DECAY,
    LEAST_WIDTH,
    PREPARE_ARRAYS,
    ROWS,
    WINDOW,
    entry_scores,
    entry_values,
    for_rows,
    load_state,
    next_launch_may_begin,
    prefetch_entries,
    row_log,
    row_sums,
    scratch,
    slot_of,
    tile_columns,
    tile_rows,
    tiles_of_a_program,
    tiles_of_program,
    wait_for_previous_launch,
)

BLOCK_ENTRIES = tl.constexpr(8)  # that the first launch takes at once where it leaves out what is empty of a log
SCALARS = tl.constexpr(3)  # of a token and value head: beta, its query times its own key, and the state's decay


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
    """A token's query, key, gate and beta, as they came; zeros unless it is computed."""
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
    entry,
    start,
    end,
    channel,
    in_K,
    in_part,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
):
    """Normalised keys and decay sums of a log's entries; zeros for those that are not the row's."""
    inside = (entry >= start) & (entry < end)
    norms = tl.load(log_norm + entry * HEADS, mask=inside, other=0)
    keys = log_k + (entry * (HEADS * K))[:, None] + channel[None, :]
    keys = tl.load(keys, mask=inside[:, None] & in_K[None, :], other=0).to(tl.float32) * norms[:, None]
    Gs = log_G[None, :] + (entry * PARTS)[:, None]
    return keys, tl.load(Gs, mask=inside[:, None] & in_part[None, :], other=0)


@triton.jit
def _store_scores(scores, entry, below, keys, Gs, key, met_by, G, CHANNELS: tl.constexpr):
    """What a token's key and query meet in those entries that are `below` it; zeros for the others."""
    decays = tl.exp2(G[None, :] - Gs)
    if CHANNELS:
        met = keys * decays
        tl.store(scores + entry, tl.where(below, tl.sum(met * key[None, :], axis=1), 0.0))
        tl.store(scores + WINDOW + entry, tl.where(below, tl.sum(met * met_by[None, :], axis=1), 0.0))
    else:
        place = scores[None, :] + entry[:, None]
        decays = tl.where(below[:, None], decays, 0.0)
        tl.store(place, tl.sum(keys * key[None, :], axis=1)[:, None] * decays)
        tl.store(place + WINDOW, tl.sum(keys * met_by[None, :], axis=1)[:, None] * decays)


@triton.jit(do_not_specialize=["k_stride", "norm_stride", "G_stride", "tokens_per_decode", "beta_scale"])
def _prepare_kernel(
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
    lengths,
    slots,
    starts,
    ends,
    depths,
    k_stride,
    norm_stride,
    G_stride,
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
    """A program takes one key head of one row. It logs the new tokens' keys and decays, and leaves of every token what
    the state is to meet, its key and its query, in `vectors` [F, H, 2, K], and what they met in the log in `scores`
    [F, HV, 2, 16]. Its entry stands in the lane of its depth, where siblings before it stood: in preorder those below
    are its path. A token's inputs are asked for before what comes first is used: each wait is a good part of all. With
    ONE_TOKEN nothing is kept for a next one, which takes a third fewer registers; where channels have decays of their
    own, parts of a log without an entry are left out then, on average a third of all."""
    GROUP: tl.constexpr = VALUE_HEADS // HEADS
    PARTS: tl.constexpr = VALUE_HEADS * K if CHANNELS else VALUE_HEADS
    SPLIT: tl.constexpr = CHANNELS and ONE_TOKEN
    ASKED: tl.constexpr = K if K == BLOCK_K else BLOCK_K // 2  # a power of 2, and no line beyond the log
    wait_for_previous_launch()
    row, head = row_and_tile(HEADS)
    channel, entry = tl.arange(0, BLOCK_K), tl.arange(0, WINDOW)
    in_K = channel < K
    length = tl.load(lengths + row)
    slot, start, end = row_log(slots, starts, ends, row)
    depth = tl.load(depths + row)
    log_k = slot_of(log_k, slot, k_stride) + head * K
    log_norm = slot_of(log_norm, slot, norm_stride) + head
    # A part is what has a decay of its own: a channel, or a value head of this key head. The last one is repeated up to
    # a power of 2.
    if CHANNELS:
        value_head = head
        part, in_part = head * K + channel, in_K
    else:
        value_head = head * GROUP + tl.arange(0, BLOCK_GROUP)
        if BLOCK_GROUP > GROUP:
            value_head = tl.minimum(value_head, head * GROUP + GROUP - 1)
        part, in_part = value_head, value_head < VALUE_HEADS
    rate = tl.load(A_log + value_head).to(tl.float32)
    bias = tl.load(dt_bias + part, mask=in_part, other=0).to(tl.float32)
    log_G = slot_of(log_G, slot, G_stride)
    if SPLIT:
        prefetch_entries(log_k, start, end, HEADS * K, ASKED)
        prefetch_entries(log_G + head * K, start, end, PARTS, ASKED)
    log_G += part

    next_launch_may_begin()
    token = row.to(tl.int64) * tokens_per_decode
    query, raw, gate, beta = _load_token(
        q, k, a, b, token, length > 0, head, value_head, part, channel, in_K, in_part,
        Q_STRIDES, K_STRIDES, A_STRIDES, B_STRIDES, CHANNELS,
    )  # fmt: skip
    if not SPLIT:
        keys, Gs = _load_entries(log_k, log_norm, log_G, entry, start, end, channel, in_K, in_part, HEADS, PARTS, K)
    G = tl.load(log_G + (end - 1) * PARTS, mask=tl.where(end > start, in_part, False), other=0)
    lane = end
    for t in range(1 if ONE_TOKEN else tokens_per_decode):
        here = end + t
        next_query, next_raw, next_gate, next_beta = _load_token(
            q, k, a, b, token + 1, t + 1 < length, head, value_head, part, channel, in_K, in_part,
            Q_STRIDES, K_STRIDES, A_STRIDES, B_STRIDES, CHANNELS,
        )  # fmt: skip
        known, mine = tl.where(t < length, in_K, False), tl.where(t < length, in_part, False)
        key = raw.to(tl.float32)
        norm = tl.rsqrt(tl.sum(key * key, axis=0) + NORM_EPS)
        key *= norm
        met_by = normalized(query.to(tl.float32)) * K**-0.5
        G += tl.maximum(log2_decay(gate.to(tl.float32), rate, bias), LEAST_DECAY)
        tl.store(log_k + here * (HEADS * K) + channel, raw, mask=known)
        tl.store(log_norm + here * HEADS, norm, mask=t < length)
        tl.store(log_G + here * PARTS, G, mask=mine)

        total = tl.exp2(G)
        score = scores + (token * VALUE_HEADS + value_head) * (2 * WINDOW)
        vector = vectors + (token * HEADS + head) * (2 * K) + channel
        scalar = scalars + (token * VALUE_HEADS + value_head) * SCALARS
        own = tl.sum(key * met_by, axis=0)
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
        if SPLIT:
            first = start // BLOCK_ENTRIES * BLOCK_ENTRIES
            skipped = (entry < first) | (entry >= end)
            tl.store(score + entry, tl.zeros([WINDOW], tl.float32), mask=skipped)
            tl.store(score + WINDOW + entry, tl.zeros([WINDOW], tl.float32), mask=skipped)
            for block in range(first, end, BLOCK_ENTRIES):
                some = block + tl.arange(0, BLOCK_ENTRIES)
                some_keys, some_Gs = _load_entries(
                    log_k, log_norm, log_G, some, start, end, channel, in_K, in_part, HEADS, PARTS, K
                )
                _store_scores(score, some, some < end, some_keys, some_Gs, key, met_by, G, CHANNELS)
        else:
            _store_scores(score, entry, entry < lane, keys, Gs, key, met_by, G, CHANNELS)
            if t + 1 < length:
                new = (entry == lane)[:, None]
                keys, Gs = tl.where(new, key[None, :], keys), tl.where(new, G[None, :], Gs)
                next_lane = end + (depth >> 4 * (t + 1) & 15)
                if next_lane <= lane:  # a branch: decays go on from its parent's
                    G = tl.sum(tl.where((entry == next_lane - 1)[:, None], Gs, 0.0), axis=0)
                lane = next_lane
        token += 1
        query, raw, gate, beta = next_query, next_raw, next_gate, next_beta


@triton.jit(do_not_specialize=["slot_stride", "u_stride", "tokens_per_decode"])
def _decode_kernel(
    v,
    state,
    out,
    log_u,
    scores,
    vectors,
    scalars,
    src,
    dst,
    lengths,
    slots,
    starts,
    ends,
    depths,
    slot_stride,
    u_stride,
    tokens_per_decode,
    V_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """A program takes TILES tiles of BLOCK_V rows of one value head's state past the tokens of one row."""
    next_launch_may_begin()
    row, head, first_value = tiles_of_program(TILES, VALUE_HEADS, V, BLOCK_V)
    key_head = head // (VALUE_HEADS // HEADS)
    source, length, folded = tl.load(src + row), tl.load(lengths + row), tl.load(dst + row) != 0
    slot, start, end = row_log(slots, starts, ends, row)
    log_u = slot_of(log_u, slot, u_stride) + head * V
    prefetch_entries(log_u + first_value, start, end, VALUE_HEADS * V, TILES * BLOCK_V)
    depth = tl.load(depths + row)
    lane, channel, entry = tile_rows(BLOCK_V), tile_columns(BLOCK_K), tl.arange(0, WINDOW)
    in_K = channel < K
    element = lane[:, :, None, None] * K + channel
    state += source * slot_elements(slot_stride, state) + (head * V + first_value) * K
    read = tl.broadcast_to(tl.where(source != 0, in_K, False), element.shape)
    for tile in range(TILES):
        value = first_value + tile * BLOCK_V + lane
        S = load_state(state + tile * (BLOCK_V * K) + element, read, folded)
        us = entry_values(log_u, start, end, value, VALUE_HEADS * V)
        wait_for_previous_launch()
        for t in range(1 if ONE_TOKEN else tokens_per_decode):
            token = row.to(tl.int64) * tokens_per_decode + t
            computed = t < length
            vector = vectors + (token * HEADS + key_head) * (2 * K)
            score = scores + (token * VALUE_HEADS + head) * (2 * WINDOW)
            scalar = scalars + (token * VALUE_HEADS + head) * SCALARS
            total = tl.load(scalar + 2)
            x = tl.load(v + token * V_STRIDES[0] + head * V_STRIDES[1] + value, mask=value < V).to(tl.float32)
            by_key = tl.sum(S * for_rows(vector, channel, in_K), axis=2) * total
            by_query = tl.sum(S * for_rows(vector + K, channel, in_K), axis=2) * total
            u = tl.load(scalar) * (x - row_sums(by_key, us * entry_scores(score)))
            o = row_sums(by_query, us * entry_scores(score + WINDOW)) + tl.load(scalar + 1) * u
            o = tl.where(computed, o, 0.0).to(out.dtype.element_ty)
            tl.store(out + token * OUT_STRIDE + head * V + value, o)
            tl.store(log_u + (end + t) * (VALUE_HEADS * V) + value, u, mask=tl.where(computed, value < V, False))
            if t + 1 < length:
                place = end + (depth >> 4 * t & 15)
                us = tl.where((entry == place)[None, None, :], u[:, :, None], us)


_launch_prepare = Launcher(_prepare_kernel)
_launch = Launcher(_decode_kernel)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    beta_scale: float,
    out: Tensor,
) -> None:
    """Fills the decode tokens of `out` [F, HV, V] and logs them; a is KDA's g where it is [F, H, K].

    Scratch: 140 HV + 8 H K bytes a token.
    """
    heads, K = k.shape[1:]
    value_heads, V = v.shape[1:]
    rows, width = indices.num_decodes, indices.tokens_per_decode
    q_strides, k_strides, v_strides, a_strides, b_strides = layer_strides(q, k, v, a, b)
    log_k, log_norm, log_u, log_G = log
    sizes = 2 * WINDOW.value * value_heads, 2 * heads * K, SCALARS.value * value_heads
    between = scratch(v, [rows * width * size for size in sizes])
    block_K = max(power_of_2(K), LEAST_WIDTH)
    _launch_prepare(
        rows * heads,
        (q, k, a, b, A_log, dt_bias, log_k, log_norm, log_G, *between),
        index_pointers(indices, PREPARE_ARRAYS),
        (*map(slot_stride, (log_k, log_norm, log_G)), width, float(beta_scale)),
        {
            "Q_STRIDES": q_strides,
            "K_STRIDES": k_strides,
            "A_STRIDES": a_strides,
            "B_STRIDES": b_strides,
            "HEADS": heads,
            "VALUE_HEADS": value_heads,
            "K": K,
            "BLOCK_K": block_K,
            "BLOCK_GROUP": power_of_2(value_heads // heads),
            "CHANNELS": a.dim() == 3,
            "ONE_TOKEN": width == 1,
        },
        num_warps=1 if block_K <= 128 else 4,  # of which each thread has two channels or more
        launch_pdl=True,
    )
    tiles = tiles_of_a_program(V)
    _launch(
        rows * value_heads * (V // ROWS // tiles),
        (v, state, out, log_u, *between),
        index_pointers(indices, DECODE_ARRAYS),
        (slot_stride(state), slot_stride(log_u), width),
        {
            "V_STRIDES": v_strides,
            "OUT_STRIDE": out.stride(0),
            "HEADS": heads,
            "VALUE_HEADS": value_heads,
            "K": K,
            "V": V,
            "BLOCK_K": block_K,
            "BLOCK_V": ROWS,
            "TILES": tiles,
            "ONE_TOKEN": width == 1,
        },
        num_warps=1,
        maxnreg=128 if block_K <= 128 else 255,  # 16 programs a processor: what little it takes more halves them
        launch_pdl=True,
    )
