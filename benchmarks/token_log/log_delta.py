"""Gated delta rule and Kimi Delta Attention: decode over a token log, and its fold."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from log_window import (
    FOLD_PROGRAMS,
    FOLD_ROWS,
    PROGRAM_TILES,
    ROWS,
    WINDOW,
    fold_update,
    for_rows,
    next_launch_may_begin,
    row_window,
    slot_of,
    slot_units,
    task_of_fold,
    tile_columns,
    tile_rows,
    tiles_of_program,
    wait_for_previous_launch,
    window_scores,
    window_values,
)
from torch import Tensor

from mambacache.kernels.gpu.common import state_tile
from mambacache.kernels.gpu.common.chunks import row_and_tile
from mambacache.kernels.gpu.common.delta_rule import NORM_EPS, log2_decay, normalized
from mambacache.kernels.gpu.common.layout import layer_strides, power_of_2, slot_elements, slot_stride

LEAST_DECAY = tl.constexpr(-34.6)  # of one token, in log2: beyond it differences of sums would lose their last bits
SCALARS = tl.constexpr(3)  # of a token and value head: beta, its query times its own key, and the state's decay


def log_entry(k: Tensor, v: Tensor, channels: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What the log holds of one token: its key with the inverse of its norm, u, and the sum of log2 decays up to it, of
    each channel or all.

    k [F, H, K], v [F, HV, V].
    """
    heads, K = k.shape[1:]
    value_heads, V = v.shape[1:]
    decay = (value_heads, K) if channels else (value_heads,)
    fp32 = torch.float32
    return {"k": ((heads, K), k.dtype), "norm": ((heads,), fp32), "u": ((value_heads, V), fp32), "G": (decay, fp32)}


def scratch_of(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Memory between the two launches: scores, vectors and scalars of every token."""
    heads, K = k.shape[1:]
    sizes = v.shape[1] * 2 * WINDOW.value, heads * 2 * K, v.shape[1] * SCALARS.value
    return tuple(torch.full((len(k) * size,), torch.nan, device=k.device) for size in sizes)


@triton.jit(do_not_specialize=["log_stride", "tokens_per_decode"])
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
    firsts,
    ats,
    log_stride,
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
    CHANNELS: tl.constexpr,
):
    """A program takes one key head of one row. It logs the new tokens' keys and decays, and leaves of every token what
    the state is to meet, its key and its query, in `vectors` [F, H, 2, K], and what they met in the window in `scores`
    [F, HV, 2, 16]."""
    GROUP: tl.constexpr = VALUE_HEADS // HEADS
    PARTS: tl.constexpr = VALUE_HEADS * K if CHANNELS else VALUE_HEADS
    row, head = row_and_tile(HEADS)
    channel, entry = tl.arange(0, BLOCK_K), tl.arange(0, WINDOW)
    in_K = channel < K
    length = tl.load(lengths + row)
    slot, first, at = row_window(slots, firsts, ats, row)
    log_k = slot_of(log_k, slot, log_stride) + head * K
    log_norm = slot_of(log_norm, slot, log_stride) + head
    # A part is what has a decay of its own: a channel, or a value head of this key head.
    if CHANNELS:
        value_head = head
        part, in_part = head * K + channel, in_K
    else:
        value_head = head * GROUP + tl.arange(0, GROUP)
        part, in_part = value_head, value_head < VALUE_HEADS
    rate = tl.load(A_log + value_head).to(tl.float32)
    bias = tl.load(dt_bias + part, mask=in_part, other=0).to(tl.float32)
    log_G = slot_of(log_G, slot, log_stride) + part

    next_launch_may_begin()
    inside = (entry >= first) & (entry < at)
    norms = tl.load(log_norm + entry * HEADS, mask=inside, other=0)
    keys = log_k + (entry * (HEADS * K))[:, None] + channel[None, :]
    keys = tl.load(keys, mask=inside[:, None] & in_K[None, :], other=0)
    Gs = log_G[None, :] + (entry * PARTS)[:, None]
    Gs = tl.load(Gs, mask=inside[:, None] & in_part[None, :], other=0)
    G = tl.load(log_G + (at - 1) * PARTS, mask=tl.where(at > first, in_part, False), other=0)
    for t in range(tokens_per_decode):
        token = row.to(tl.int64) * tokens_per_decode + t
        here = at + t
        known, mine = tl.where(t < length, in_K, False), tl.where(t < length, in_part, False)
        query = tl.load(q + token * Q_STRIDES[0] + head * Q_STRIDES[1] + channel, mask=known, other=0).to(tl.float32)
        raw = tl.load(k + token * K_STRIDES[0] + head * K_STRIDES[1] + channel, mask=known, other=0)
        gate = a + token * A_STRIDES[0] + (head * A_STRIDES[1] + channel if CHANNELS else part * A_STRIDES[1])
        gate = tl.load(gate, mask=mine, other=0).to(tl.float32)
        beta = tl.load(b + token * B_STRIDES[0] + value_head * B_STRIDES[1]).to(tl.float32)
        key = raw.to(tl.float32)
        norm = tl.rsqrt(tl.sum(key * key, axis=0) + NORM_EPS)
        key *= norm
        query = normalized(query) * K**-0.5
        G += tl.maximum(log2_decay(gate, rate, bias), LEAST_DECAY)
        tl.store(log_k + here * (HEADS * K) + channel, raw, mask=known)
        tl.store(log_norm + here * HEADS, norm, mask=t < length)
        tl.store(log_G + here * PARTS, G, mask=mine)

        decays, total = tl.exp2(G[None, :] - Gs), tl.exp2(G)
        met = keys.to(tl.float32) * norms[:, None]
        score = (token * VALUE_HEADS + value_head) * (2 * WINDOW)
        vector = vectors + (token * HEADS + head) * (2 * K) + channel
        scalar = scalars + (token * VALUE_HEADS + value_head) * SCALARS
        own = tl.sum(key * query, axis=0)
        tl.store(scalar, beta_scale / (1 + tl.exp(-beta)))
        if CHANNELS:
            met *= decays
            tl.store(scores + score + entry, tl.sum(met * key[None, :], axis=1))
            tl.store(scores + score + WINDOW + entry, tl.sum(met * query[None, :], axis=1))
            tl.store(vector, key * total, mask=in_K)
            tl.store(vector + K, query * total, mask=in_K)
            tl.store(scalar + 1, own)
            tl.store(scalar + 2, 1.0)
        else:
            place = scores + score[None, :] + entry[:, None]
            tl.store(place, tl.sum(met * key[None, :], axis=1)[:, None] * decays)
            tl.store(place + WINDOW, tl.sum(met * query[None, :], axis=1)[:, None] * decays)
            tl.store(vector, key, mask=in_K)
            tl.store(vector + K, query, mask=in_K)
            tl.store(scalar + 1, own + tl.zeros_like(beta))
            tl.store(scalar + 2, total)
        new = entry == here
        norms, keys = tl.where(new, norm, norms), tl.where(new[:, None], raw[None, :], keys)
        Gs = tl.where(new[:, None], G[None, :], Gs)


@triton.jit(do_not_specialize=["slot_stride", "log_stride", "tokens_per_decode", "tiles"])
def _decode_kernel(
    v,
    state,
    out,
    log_u,
    scores,
    vectors,
    scalars,
    src,
    lengths,
    slots,
    firsts,
    ats,
    slot_stride,
    log_stride,
    tokens_per_decode,
    tiles,
    V_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A program takes some tiles of BLOCK_V rows of one value head's state past the tokens of one row."""
    row, head, first_value = tiles_of_program(tiles, VALUE_HEADS, V, BLOCK_V)
    key_head = head // (VALUE_HEADS // HEADS)
    source, length = tl.load(src + row), tl.load(lengths + row)
    slot, first, at = row_window(slots, firsts, ats, row)
    lane, channel, entry = tile_rows(BLOCK_V), tile_columns(BLOCK_K), tl.arange(0, WINDOW)
    in_K = channel < K
    element = lane[:, :, None, None] * K + channel
    state += source * slot_elements(slot_stride, state) + (head * V + first_value) * K
    read = tl.broadcast_to(tl.where(source != 0, in_K, False), element.shape)
    log_u = slot_of(log_u, slot, log_stride) + head * V
    for tile in range(tiles):
        value = first_value + tile * BLOCK_V + lane
        S = tl.load(state + tile * (BLOCK_V * K) + element, mask=read, other=0).to(tl.float32)
        us = window_values(log_u, first, at, value, VALUE_HEADS * V)
        wait_for_previous_launch()
        for t in range(tokens_per_decode):
            token = row.to(tl.int64) * tokens_per_decode + t
            computed = t < length
            vector = vectors + (token * HEADS + key_head) * (2 * K)
            score = scores + (token * VALUE_HEADS + head) * (2 * WINDOW)
            scalar = scalars + (token * VALUE_HEADS + head) * SCALARS
            total = tl.load(scalar + 2)
            x = tl.load(v + token * V_STRIDES[0] + head * V_STRIDES[1] + value, mask=value < V).to(tl.float32)
            by_key = tl.sum(S * for_rows(vector, channel, in_K), axis=2) * total
            by_query = tl.sum(S * for_rows(vector + K, channel, in_K), axis=2) * total
            u = tl.load(scalar) * (x - tl.sum(by_key + us * window_scores(score), axis=2))
            o = tl.sum(by_query + us * window_scores(score + WINDOW), axis=2) + tl.load(scalar + 1) * u
            o = tl.where(computed, o, 0.0).to(out.dtype.element_ty)
            tl.store(out + token * OUT_STRIDE + head * V + value, o)
            tl.store(log_u + (at + t) * (VALUE_HEADS * V) + value, u, mask=tl.where(computed, value < V, False))
            us = tl.where((entry == at + t)[None, None, :], u[:, :, None], us)


@triton.jit(do_not_specialize=["slot_stride", "log_stride"])
def _fold_kernel(
    state,
    log_k,
    log_norm,
    log_u,
    log_G,
    folds,
    slot_stride,
    log_stride,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A program takes, one after the other, tiles of BLOCK_V rows of one value head's state of rows that are folded."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    entry, channel, lane = tl.arange(0, WINDOW), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_K = channel < K
    stride = slot_elements(slot_stride, state)
    for task in range(tl.program_id(0), tl.load(folds) * (VALUE_HEADS * TILES), tl.num_programs(0)):
        head, tile, source, target, slot, first = task_of_fold(folds, task, VALUE_HEADS, TILES)
        key_head, value = head // (VALUE_HEADS // HEADS), tile * BLOCK_V + lane
        element, there = state_tile.tile_elements(tile * BLOCK_V, V, K, BLOCK_V, BLOCK_K)
        place = state + head * V * K + element
        S = state_tile.load_tile(place + source * stride, tl.where(source != 0, there, False), BLOCK_V, BLOCK_K)

        inside = entry >= first
        keys = slot_of(log_k, slot, log_stride) + (entry * (HEADS * K) + key_head * K)[:, None] + channel[None, :]
        keys = tl.load(keys, mask=inside[:, None] & in_K[None, :], other=0)
        us = slot_of(log_u, slot, log_stride) + (entry * (VALUE_HEADS * V) + head * V)[None, :] + value[:, None]
        us = tl.load(us, mask=inside[None, :] & (value < V)[:, None], other=0)
        norms = tl.load(slot_of(log_norm, slot, log_stride) + entry * HEADS + key_head, mask=inside, other=0)
        G = slot_of(log_G, slot, log_stride)
        if CHANNELS:
            G += head * K + channel
            last = tl.load(G + (WINDOW - 1) * VALUE_HEADS * K, mask=in_K, other=0)
            Gs = tl.load(
                G[None, :] + (entry * (VALUE_HEADS * K))[:, None], mask=inside[:, None] & in_K[None, :], other=0
            )
            keys = keys.to(tl.float32) * tl.exp2(last[None, :] - Gs)
            S *= tl.exp2(last)[None, :]
        else:
            last = tl.load(G + (WINDOW - 1) * VALUE_HEADS + head)
            norms *= tl.exp2(last - tl.load(G + entry * VALUE_HEADS + head, mask=inside, other=0))
            S *= tl.exp2(last)
        S = fold_update(us * norms[None, :], keys, S)
        state_tile.store_tile(place + target * stride, S, there)


def _shape(k: Tensor, v: Tensor) -> dict[str, int]:
    return {"HEADS": k.shape[1], "VALUE_HEADS": v.shape[1], "K": k.shape[2], "BLOCK_K": max(16, power_of_2(k.shape[2]))}


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    log: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    out: Tensor,
    scratch: tuple[Tensor, ...],
    tiles: int = PROGRAM_TILES,
) -> None:
    """Fills `out` [F, HV, V] and logs the tokens; a is KDA's g where it has a channel for each key's."""
    strides = layer_strides(q, k, v, a, b)
    count, stride = len(rows["src"]), slot_units(log["k"])
    tokens = len(q) // count
    places = [rows[name] for name in ("length", "slot", "first", "at")]
    shape = _shape(k, v)
    _prepare_kernel[(count * shape["HEADS"],)](
        q, k, a, b, A_log, dt_bias, log["k"], log["norm"], log["G"], *scratch, *places, stride, tokens, 1.0,
        Q_STRIDES=strides[0], K_STRIDES=strides[1], A_STRIDES=strides[3], B_STRIDES=strides[4],
        CHANNELS=a.dim() == 3, num_warps=1, **shape,
    )  # fmt: skip
    V = v.shape[2]
    tiles = min(tiles, V // ROWS)
    _decode_kernel[(count * shape["VALUE_HEADS"] * (V // ROWS // tiles),)](
        v, state, out, log["u"], *scratch, rows["src"], *places, slot_stride(state), stride, tokens, tiles,
        V_STRIDES=strides[2], OUT_STRIDE=out.stride(0), V=V, BLOCK_V=ROWS, num_warps=1, launch_pdl=True, **shape,
    )  # fmt: skip


def fold(k: Tensor, v: Tensor, state: Tensor, log: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
    """Stores the states behind the windows that a step has filled; k and v give their shapes alone."""
    shape = _shape(k, v)
    tiles = -(-v.shape[2] // FOLD_ROWS) * shape["VALUE_HEADS"] * len(rows["src"])
    _fold_kernel[(min(tiles, FOLD_PROGRAMS),)](
        state, log["k"], log["norm"], log["u"], log["G"], rows["folds"], slot_stride(state), slot_units(log["k"]),
        V=v.shape[2], BLOCK_V=FOLD_ROWS, CHANNELS=log["G"].dim() == 4, num_warps=4, **shape,
    )  # fmt: skip
