"""Gated delta rule over the decode rows of a batch, in one Triton launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..indices import StateIndices
from .delta_rule import log2_decay, normalized
from .launch import Launcher

BLOCK_V = 8  # rows of the state of one program, a single warp


@triton.jit(
    do_not_specialize=[
        "slot_stride",
        "tokens_per_decode",
        "q_stride",
        "k_stride",
        "v_stride",
        "q_head_stride",
        "k_head_stride",
        "v_head_stride",
        "a_stride",
        "b_stride",
        "a_head_stride",
        "b_head_stride",
    ]
)
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
    dst,
    slot_stride,
    tokens_per_decode,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    a_stride,
    a_head_stride,
    b_stride,
    b_head_stride,
    beta_scale,
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
    head = tl.program_id(0) // TILES
    key_head = head // (VALUE_HEADS // HEADS)
    row = tl.program_id(1)
    value = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_K)
    in_K = channel < K
    rate = tl.load(A_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)

    state += head * V * K
    element = value[:, None] * K + channel[None, :]
    slot_stride = tl.cast(slot_stride, tl.int64) * (128 // STATE.primitive_bitwidth)  # given in units of 16 bytes
    source = tl.load(src + row)
    read = tl.where(source != 0, in_K, False)[None, :]
    S = tl.load(state + source * slot_stride + element, mask=read, other=0).to(tl.float32)
    for t in range(tokens_per_decode):
        token = row.to(tl.int64) * tokens_per_decode + t
        target = tl.load(dst + token)
        computed = (target != 0) | ((t == 0) & (source != 0))
        # Nothing is said of alignment: it would choose the order of the sum in a norm, and matters little here.
        known = tl.where(computed, in_K, False)
        query = tl.load(q + token * q_stride + key_head * q_head_stride + channel, mask=known, other=0).to(tl.float32)
        key = tl.load(k + token * k_stride + key_head * k_head_stride + channel, mask=known, other=0).to(tl.float32)
        known = tl.where(computed, value < V, False)
        x = tl.load(v + token * v_stride + head * v_head_stride + value, mask=known, other=0).to(tl.float32)
        gate = tl.load(a + token * a_stride + head * a_head_stride, mask=computed, other=0).to(tl.float32)
        beta = tl.load(b + token * b_stride + head * b_head_stride, mask=computed, other=0).to(tl.float32)

        query = normalized(query) * K**-0.5
        key = normalized(key)
        decay = tl.exp2(log2_decay(gate, rate, bias))
        u = beta_scale / (1 + tl.exp(-beta)) * (x - decay * tl.sum(S * key[None, :], axis=1))
        o = decay * tl.sum(S * query[None, :], axis=1) + u * tl.sum(key * query, axis=0)
        o = tl.where(computed, o, 0.0).to(out.dtype.element_ty)
        tl.store(out + (token * VALUE_HEADS + head) * V + value, o)
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
    _launch(
        (value_heads * (V // BLOCK_V), indices.num_decodes, 1),
        (q, k, v, a, b, A_log, dt_bias, state, out, indices.decode_src, indices.decode_dst),
        (
            state.stride(0) * state.element_size() // 16,
            indices.tokens_per_decode,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *a.stride(),
            *b.stride(),
            float(beta_scale),
        ),
        {
            "HEADS": heads,
            "VALUE_HEADS": value_heads,
            "K": K,
            "V": V,
            "BLOCK_K": triton.next_power_of_2(K),
            "BLOCK_V": BLOCK_V,
        },
        num_warps=1,
    )
