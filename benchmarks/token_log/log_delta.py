"""Gated delta rule and Kimi Delta Attention: decode over a token log, in two launches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from log_window import WINDOW, slot_of, slot_units, weights_of, window_of
from torch import Tensor

from mambacache.kernels.gpu.common.chunks import row_and_tile
from mambacache.kernels.gpu.common.delta_rule import NORM_EPS, log2_decay, normalized
from mambacache.kernels.gpu.common.layout import layer_strides, power_of_2, slot_elements, slot_stride


def log_entry(k: Tensor, v: Tensor, channels: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What the log holds of one token: its key with the inverse of its norm, u, and its decay, of each channel or all.

    k [F, H, K], v [F, HV, V].
    """
    heads, K = k.shape[1:]
    value_heads, V = v.shape[1:]
    decay = (value_heads, K) if channels else (value_heads,)
    fp32 = torch.float32
    return {"k": ((heads, K), k.dtype), "norm": ((heads,), fp32), "u": ((value_heads, V), fp32), "decay": (decay, fp32)}


@triton.jit(do_not_specialize=["log_stride", "tokens_per_decode"])
def _prepare_kernel(
    q,
    k,
    a,
    A_log,
    dt_bias,
    log_k,
    log_norm,
    log_decay,
    scores,
    totals,
    lengths,
    slots,
    starts,
    helds,
    rooms,
    log_stride,
    tokens_per_decode,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    A_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A program takes one key head of one row. It logs the new tokens' keys and decays, and leaves what each token's
    key and query meet in its window in `scores` [F, HV, 2, 16], and `total` in `totals` [F, HV] or [F, HV, K]."""
    GROUP: tl.constexpr = VALUE_HEADS // HEADS
    row, head = row_and_tile(HEADS)
    channel, entry = tl.arange(0, BLOCK_K), tl.arange(0, WINDOW)
    in_K = channel < K
    length = tl.load(lengths + row)
    start, count, room = window_of(tl.load(helds + row), tl.load(rooms + row), tl.load(starts + row))
    slot = tl.load(slots + row).to(tl.int64)
    log_k = slot_of(log_k, slot, log_stride) + head * K
    log_norm = slot_of(log_norm, slot, log_stride) + head
    # Of its value heads [GROUP], or channels [BLOCK_K]: what has a decay of its own.
    if CHANNELS:
        part, in_part = head * K + channel, in_K
        rate = tl.load(A_log + head).to(tl.float32)
        places = scores + head * (2 * WINDOW) + entry
    else:
        part = head * GROUP + tl.arange(0, GROUP)
        in_part = part < VALUE_HEADS
        rate = tl.load(A_log + part).to(tl.float32)
        places = scores + (part * (2 * WINDOW))[None, :] + entry[:, None]
    PARTS: tl.constexpr = VALUE_HEADS * K if CHANNELS else VALUE_HEADS
    bias = tl.load(dt_bias + part, mask=in_part, other=0).to(tl.float32)
    log_decay = slot_of(log_decay, slot, log_stride) + part

    place, after = (start + entry) % CAPACITY, (start + entry + 1) % CAPACITY
    held, follows = entry < count, entry + 1 < count
    norms = tl.load(log_norm + place * HEADS, mask=held, other=0)
    keys = log_k + (place * (HEADS * K))[:, None] + channel[None, :]
    keys = tl.load(keys, mask=held[:, None] & in_K[None, :], other=0).to(tl.float32) * norms[:, None]
    following = log_decay[None, :] + (after * PARTS)[:, None]
    following = tl.load(following, mask=follows[:, None] & in_part[None, :], other=1)
    first = tl.load(log_decay + start % CAPACITY * PARTS, mask=tl.where(count > 0, in_part, False), other=1)
    for t in range(tokens_per_decode):
        token = row.to(tl.int64) * tokens_per_decode + t
        known, mine = tl.where(t < length, in_K, False), tl.where(t < length, in_part, False)
        query = tl.load(q + token * Q_STRIDES[0] + head * Q_STRIDES[1] + channel, mask=known, other=0).to(tl.float32)
        raw = tl.load(k + token * K_STRIDES[0] + head * K_STRIDES[1] + channel, mask=known, other=0)
        gate = a + token * A_STRIDES[0] + (head * A_STRIDES[1] + channel if CHANNELS else part * A_STRIDES[1])
        gate = tl.load(gate, mask=mine, other=0).to(tl.float32)
        key = raw.to(tl.float32)
        norm = tl.rsqrt(tl.sum(key * key, axis=0) + NORM_EPS)
        key *= norm
        query = normalized(query) * K**-0.5
        decay = tl.exp2(log2_decay(gate, rate, bias))
        spot = (start + count) % CAPACITY
        tl.store(log_k + spot * (HEADS * K) + channel, raw, mask=known)
        tl.store(log_norm + spot * HEADS, norm, mask=t < length)
        tl.store(log_decay + spot * PARTS, decay, mask=mine)

        keys = tl.where((entry == count)[:, None], key[None, :], keys)
        following = tl.where((entry + 1 == count)[:, None], decay[None, :], following)
        first = tl.where(count == 0, decay, first)
        weights, total = weights_of(following, first)
        score = places + token * (VALUE_HEADS * 2 * WINDOW)
        if CHANNELS:
            by_key = tl.sum(keys * weights * key[None, :], axis=1)
            by_query = tl.sum(keys * weights * query[None, :], axis=1)
            tl.store(score, tl.where(entry < count, by_key, 0))
            tl.store(score + WINDOW, by_query)
        else:
            by_key, by_query = tl.sum(keys * key[None, :], axis=1), tl.sum(keys * query[None, :], axis=1)
            tl.store(score, tl.where(entry < count, by_key, 0)[:, None] * weights)
            tl.store(score + WINDOW, by_query[:, None] * weights)
        tl.store(totals + token * PARTS + part, total, mask=in_part)
        count += 1
        if count == room:
            start += count
            count, room = 0, WINDOW
            keys, following = tl.zeros_like(keys), tl.full(following.shape, 1.0, tl.float32)


@triton.jit
def _held_values(log_u, start, count, value, STRIDE: tl.constexpr, CAPACITY: tl.constexpr):
    """u [16, values] of a window's entries."""
    entry = tl.arange(0, WINDOW)
    place = log_u + ((start + entry) % CAPACITY * STRIDE)[:, None] + value[None, :]
    return tl.load(place, mask=(entry < count)[:, None] & (value >= 0)[None, :], other=0)


@triton.jit(do_not_specialize=["slot_stride", "log_stride", "tokens_per_decode"])
def _decode_kernel(
    q,
    k,
    v,
    b,
    state,
    out,
    log_k,
    log_norm,
    log_u,
    log_decay,
    scores,
    totals,
    src,
    dst,
    lengths,
    slots,
    starts,
    helds,
    rooms,
    slot_stride,
    log_stride,
    tokens_per_decode,
    beta_scale,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A program takes BLOCK_V rows of one value head's state past the tokens of one row, and logs their u."""
    TILES: tl.constexpr = V // BLOCK_V
    VALUES: tl.constexpr = VALUE_HEADS * V
    STATE: tl.constexpr = state.dtype.element_ty
    row, tile = row_and_tile(VALUE_HEADS * TILES)
    head = tile // TILES
    key_head = head // (VALUE_HEADS // HEADS)
    value = tile % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    channel, entry = tl.arange(0, BLOCK_K), tl.arange(0, WINDOW)
    in_K = channel < K

    state += head * V * K
    element = value[:, None] * K + channel[None, :]
    slot_stride = slot_elements(slot_stride, state)
    source = tl.load(src + row)
    read = tl.where(source != 0, in_K, False)[None, :]
    S = tl.load(state + source * slot_stride + element, mask=read, other=0).to(tl.float32)
    length, target = tl.load(lengths + row), tl.load(dst + row)
    held, room, start = tl.load(helds + row), tl.load(rooms + row), tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    log_k = slot_of(log_k, slot, log_stride) + key_head * K
    log_norm = slot_of(log_norm, slot, log_stride) + key_head
    log_u = slot_of(log_u, slot, log_stride) + head * V
    log_decay = slot_of(log_decay, slot, log_stride) + (head * K if CHANNELS else head)
    count, left = tl.minimum(held, room), room
    us = _held_values(log_u, start, count, value, VALUES, CAPACITY)
    for t in range(tokens_per_decode + 1):
        if count == left:
            tl.debug_barrier()  # this launch's entries are seen
            for i in range(count):
                spot = (start + i) % CAPACITY
                key = tl.load(log_k + spot * (HEADS * K) + channel, mask=in_K, other=0).to(tl.float32)
                u = tl.load(log_u + spot * VALUES + value)
                if CHANNELS:
                    S *= tl.load(log_decay + spot * (VALUE_HEADS * K) + channel, mask=in_K, other=1)[None, :]
                else:
                    S *= tl.load(log_decay + spot * VALUE_HEADS)
                S += u[:, None] * (key * tl.load(log_norm + spot * HEADS))[None, :]
            # Stored is what consumed known tokens alone: those of the log, and the row's first.
            written = tl.where((target != 0) & (t <= 1) & (t <= length), in_K, False)[None, :]
            tl.store(state + target * slot_stride + element, S.to(STATE), mask=written)
            S = S.to(STATE).to(tl.float32)
            target = 0
            start += count
            count, left = tl.where(t == 0, held - room, 0), WINDOW
            us = _held_values(log_u, start, count, value, VALUES, CAPACITY)
        if t < tokens_per_decode:
            token = row.to(tl.int64) * tokens_per_decode + t
            computed = t < length
            known, mine = tl.where(computed, in_K, False), tl.where(computed, value < V, False)
            query = q + token * Q_STRIDES[0] + key_head * Q_STRIDES[1] + channel
            key = k + token * K_STRIDES[0] + key_head * K_STRIDES[1] + channel
            query = normalized(tl.load(query, mask=known, other=0).to(tl.float32)) * K**-0.5
            key = normalized(tl.load(key, mask=known, other=0).to(tl.float32))
            x = tl.load(v + token * V_STRIDES[0] + head * V_STRIDES[1] + value, mask=mine, other=0).to(tl.float32)
            beta = tl.load(b + token * B_STRIDES[0] + head * B_STRIDES[1], mask=computed, other=0).to(tl.float32)
            score = scores + (token * VALUE_HEADS + head) * (2 * WINDOW) + entry
            by_key, by_query = tl.load(score), tl.load(score + WINDOW)
            if CHANNELS:
                total = tl.load(totals + (token * VALUE_HEADS + head) * K + channel, mask=in_K, other=0)
                read_key = tl.sum(S * (total * key)[None, :], axis=1)
                read_query = tl.sum(S * (total * query)[None, :], axis=1)
            else:
                total = tl.load(totals + token * VALUE_HEADS + head)
                read_key = total * tl.sum(S * key[None, :], axis=1)
                read_query = total * tl.sum(S * query[None, :], axis=1)
            u = beta_scale / (1 + tl.exp(-beta)) * (x - read_key - tl.sum(by_key[:, None] * us, axis=0))
            us = tl.where((entry == count)[:, None], u[None, :], us)
            o = read_query + tl.sum(by_query[:, None] * us, axis=0)
            o = tl.where(computed, o, 0.0).to(out.dtype.element_ty)
            tl.store(out + token * OUT_STRIDE + head * V + value, o)
            tl.store(log_u + (start + count) % CAPACITY * VALUES + value, u, mask=mine)
            count += 1


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
    tokens: int,
    out: Tensor,
    scratch: tuple[Tensor, Tensor],
    block_v: int = 8,
    num_warps: int = 1,
    prepare_warps: int = 4,
) -> None:
    """Fills `out` [F, HV, V] for rows of so many `tokens`; a is KDA's g where it has a channel for each key's.

    `scratch` holds at least F HV 32 elements in fp32, and F HV, with channels F HV K.
    """
    heads, K = q.shape[1:]
    value_heads, V = v.shape[1:]
    strides = layer_strides(q, k, v, a, b)
    count, stride = len(rows["src"]), slot_units(log["k"])
    places = [rows[name] for name in ("lengths", "slot", "start", "held", "room")]
    shape = {
        "Q_STRIDES": strides[0],
        "K_STRIDES": strides[1],
        "HEADS": heads,
        "VALUE_HEADS": value_heads,
        "K": K,
        "BLOCK_K": power_of_2(K),
        "CAPACITY": log["k"].shape[1],
        "CHANNELS": a.dim() == 3,
    }
    logged = log["k"], log["norm"], log["decay"]
    _prepare_kernel[(heads * count,)](
        q, k, a, A_log, dt_bias, *logged, *scratch, *places, stride, tokens, A_STRIDES=strides[3],
        num_warps=prepare_warps, **shape,
    )  # fmt: skip
    logged = log["k"], log["norm"], log["u"], log["decay"]
    _decode_kernel[(value_heads * (V // block_v) * count,)](
        q, k, v, b, state, out, *logged, *scratch, rows["src"], rows["dst"], *places,
        slot_stride(state), stride, tokens, 1.0, V_STRIDES=strides[2], B_STRIDES=strides[4],
        OUT_STRIDE=out.stride(0), V=V, BLOCK_V=block_v, num_warps=num_warps, **shape,
    )  # fmt: skip
