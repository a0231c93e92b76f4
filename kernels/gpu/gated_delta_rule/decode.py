"""Gated delta rule over the decode rows of a batch, in one Triton launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.chunks import DECODE_ARRAYS, decode_token, row_and_tile
from ..common.delta_rule import log2_decay, normalized
from ..common.launch import Launcher, index_pointers
from ..common.layout import layer_strides, power_of_2, slot_elements, slot_stride

BLOCK_V = 8  # rows of the state of one program, a single warp


@triton.jit(do_not_specialize=["slot_stride", "tokens_per_decode"])
def _decode_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    state,
    out,
    src,
    lengths,
    dst,
    slot_stride,
    tokens_per_decode,
    beta_scale,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    A_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A program carries BLOCK_V rows of one value head's state through the tokens of one row."""
    TILES: tl.constexpr = V // BLOCK_V
    STATE: tl.constexpr = state.dtype.element_ty
    row, tile = row_and_tile(VALUE_HEADS * TILES)
    head = tile // TILES
    key_head = head // (VALUE_HEADS // HEADS)
    value = tile % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_K)
    in_K = channel < K
    rate = tl.load(A_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)

    state += head * V * K
    element = value[:, None] * K + channel[None, :]
    slot_stride = slot_elements(slot_stride, state)
    source, length = tl.load(src + row), tl.load(lengths + row)
    read = tl.where(source != 0, in_K, False)[None, :]
    S = tl.load(state + source * slot_stride + element, mask=read, other=0).to(tl.float32)
    for t in range(tokens_per_decode):
        token, target, computed = decode_token(row, t, tokens_per_decode, length, dst)
        known = tl.where(computed, in_K, False)
        query = tl.load(q + token * Q_STRIDES[0] + key_head * Q_STRIDES[1] + channel, mask=known, other=0).to(
            tl.float32
        )
        key = tl.load(k + token * K_STRIDES[0] + key_head * K_STRIDES[1] + channel, mask=known, other=0).to(tl.float32)
        known = tl.where(computed, value < V, False)
        x = tl.load(v + token * V_STRIDES[0] + head * V_STRIDES[1] + value, mask=known, other=0).to(tl.float32)
        gate = tl.load(a + token * A_STRIDES[0] + head * A_STRIDES[1], mask=computed, other=0).to(tl.float32)
        beta = tl.load(b + token * B_STRIDES[0] + head * B_STRIDES[1], mask=computed, other=0).to(tl.float32)

        query = normalized(query) * K**-0.5
        key = normalized(key)
        decay = tl.exp2(log2_decay(gate, rate, bias))
        u = beta_scale / (1 + tl.exp(-beta)) * (x - decay * tl.sum(S * key[None, :], axis=1))
        o = decay * tl.sum(S * query[None, :], axis=1) + u * tl.sum(key * query, axis=0)
        o = tl.where(computed, o, 0.0).to(out.dtype.element_ty)
        tl.store(out + token * OUT_STRIDE + head * V + value, o)
        stored = (decay * S + u[:, None] * key[None, :]).to(STATE)
        written = tl.where(target != 0, in_K, False)[None, :]
        tl.store(state + target * slot_stride + element, stored, mask=written)
        S = stored.to(tl.float32)


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
    indices: StateIndices,
    beta_scale: float,
    out: Tensor,
) -> None:
    """Fills the decode tokens of `out` [F, HV, V] and stores the state after every token where `decode_dst` says."""
    heads, K = q.shape[1:]
    value_heads, V = v.shape[1:]
    q_strides, k_strides, v_strides, a_strides, b_strides = layer_strides(q, k, v, a, b)
    _launch(
        value_heads * (V // BLOCK_V) * indices.num_decodes,
        (q, k, v, a, b, A_log, dt_bias, state, out),
        index_pointers(indices, DECODE_ARRAYS),
        (slot_stride(state), indices.tokens_per_decode, float(beta_scale)),
        {
            "Q_STRIDES": q_strides,
            "K_STRIDES": k_strides,
            "V_STRIDES": v_strides,
            "A_STRIDES": a_strides,
            "B_STRIDES": b_strides,
            "OUT_STRIDE": out.stride(0),
            "HEADS": heads,
            "VALUE_HEADS": value_heads,
            "K": K,
            "V": V,
            "BLOCK_K": power_of_2(K),
            "BLOCK_V": BLOCK_V,
        },
        num_warps=1,
    )
