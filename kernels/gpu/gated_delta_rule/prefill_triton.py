"""Run both launches of prefill in Triton.

Lines of `inverse` include beta and key norm, unless betas may exceed 1. Betas near 2 nearly reflect the state: with
keys of one direction, a rounded `inverse` would make it grow. Then `scores` and `to_end` include both instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.chunks import CHUNK, SECTOR, chunk_tokens, clear_padding, prefill_row, row_and_tile, tokens_of_chunk
from ..common.decays import log2_sums, pairwise_decays
from ..common.delta_rule import NORM_EPS, dot, log2_decay, operand, unit_lower_inverse
from ..common.launch import Launcher
from ..common.layout import slot_elements
from ..common.prefetch import later_tile, prefetch
from ..common.state_tile import load_tile, state_tile, store_tile


@triton.jit(do_not_specialize=["num_prefills", "num_tokens"])
def _prepare_kernel(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    tiles,
    vectors,
    query_start_loc,
    chunk_start,
    seq_chunk_start,
    num_prefills,
    num_tokens,
    BETA_SCALE: tl.constexpr,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    A_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    OPERAND: tl.constexpr = tiles.dtype.element_ty
    PRECISE: tl.constexpr = OPERAND == tl.float32
    REFLECTING: tl.constexpr = BETA_SCALE > 1
    chunk, head = row_and_tile(VALUE_HEADS)
    start, count = chunk_tokens(chunk, query_start_loc, chunk_start, seq_chunk_start, num_prefills, VALUE_HEADS)
    step = tl.arange(0, CHUNK)
    filled = step < count
    wide_step = step.to(tl.int64)
    t = start.to(tl.int64)

    key_head = head // (VALUE_HEADS // HEADS)
    channel = tl.arange(0, BLOCK_K)
    mask = filled[:, None] & (channel < K)[None, :]
    q += t * Q_STRIDES[0] + key_head * Q_STRIDES[1]
    k += t * K_STRIDES[0] + key_head * K_STRIDES[1]
    queries = tl.load(q + wide_step[:, None] * Q_STRIDES[0] + channel[None, :], mask=mask, other=0).to(OPERAND)
    keys = tl.load(k + wide_step[:, None] * K_STRIDES[0] + channel[None, :], mask=mask, other=0).to(OPERAND)
    a += t * A_STRIDES[0] + head * A_STRIDES[1]
    b += t * B_STRIDES[0] + head * B_STRIDES[1]
    gate = tl.load(a + wide_step * A_STRIDES[0], mask=filled, other=0).to(tl.float32)
    beta = tl.load(b + wide_step * B_STRIDES[0], mask=filled, other=0).to(tl.float32)
    rate, bias = tl.load(A_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)

    gate = tl.where(filled, log2_decay(gate, rate, bias), 0.0)
    decay = tl.exp2(tl.cumsum(gate, 0))
    sums, fine = log2_sums(gate, PRECISE)
    pairwise = pairwise_decays(sums, fine, PRECISE)
    row, column = step[:, None], step[None, :]

    tile = tiles + (t * VALUE_HEADS + head) * CHUNK + wide_step[:, None] * (VALUE_HEADS * CHUNK) + column
    score_tile = tile + tl.cast(num_tokens, tl.int64) * (VALUE_HEADS * CHUNK)
    stored = filled[:, None] & (column // SECTOR <= row // SECTOR)  # the second launch loads no more
    wide = queries.to(tl.float32)
    query_norm = tl.rsqrt(tl.sum(wide * wide, axis=1) + NORM_EPS) * K**-0.5
    scores = dot(queries, tl.trans(keys)) * pairwise * query_norm[:, None]
    if not REFLECTING:
        tl.store(score_tile, scores.to(OPERAND), mask=stored)
    products = dot(keys, tl.trans(keys))
    squares = tl.sum(tl.where(row == column, products, 0.0), axis=1)
    key_norm = tl.rsqrt(squares + NORM_EPS)
    scale = key_norm * BETA_SCALE / (1 + tl.exp(-beta))
    system = products * pairwise * key_norm[:, None] * scale[None, :]
    if REFLECTING:
        tl.store(score_tile, (scores * scale[None, :]).to(OPERAND), mask=stored)
    # For betas above 1 bf16 has too few digits.
    inverse = unit_lower_inverse(system, tl.float16 if REFLECTING and not PRECISE else OPERAND)
    to_end = tl.sum(tl.where(row == CHUNK - 1, pairwise, 0.0), axis=0)
    if REFLECTING:
        to_end *= scale
    else:
        inverse *= scale[:, None]
    tl.store(tile, inverse.to(OPERAND), mask=stored)

    vector = vectors + head.to(tl.int64) * (4 * num_tokens) + t + step
    tl.store(vector, decay, mask=filled)
    tl.store(vector + num_tokens, decay * key_norm, mask=filled)
    tl.store(vector + 2 * num_tokens, decay * query_norm, mask=filled)
    tl.store(vector + 3 * num_tokens, to_end, mask=filled)


@triton.jit(do_not_specialize=["num_prefills", "slot_stride", "num_tokens"])
def _scan_kernel(
    q,
    k,
    v,
    tiles,
    vectors,
    state,
    out,
    query_start_loc,
    rows,
    chunk_dst,
    num_prefills,
    slot_stride,
    num_tokens,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CONCURRENT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Carry BLOCK_V lines of a value head's state through a sequence."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    OPERAND: tl.constexpr = tiles.dtype.element_ty
    STATE: tl.constexpr = state.dtype.element_ty
    sequence, index = row_and_tile(VALUE_HEADS * TILES)
    head = index // TILES
    first_row = index % TILES * BLOCK_V
    row = tl.arange(0, BLOCK_V)
    step = tl.arange(0, CHUNK)
    in_V = first_row + row < V
    out += head * V + first_row

    if sequence == num_prefills:
        clear_padding(out, query_start_loc, num_prefills, num_tokens, row, in_V, OUT_STRIDE)
        return

    batch_row = prefill_row(rows, sequence)
    slot_stride = slot_elements(slot_stride, state)
    later_state = later_tile(
        state, rows, num_prefills, slot_stride, sequence, index, VALUE_HEADS * TILES, V * K, CONCURRENT
    )

    held = state_tile(state, slot_stride, head, first_row, V, K, BLOCK_V, BLOCK_K)
    S = load_tile(held, batch_row.slot)

    if BLOCK_V == V and BLOCK_K == K:
        prefetch(later_state, V * K)

    channel = tl.arange(0, BLOCK_K)
    in_K = channel < K
    q += head // (VALUE_HEADS // HEADS) * Q_STRIDES[1]
    k += head // (VALUE_HEADS // HEADS) * K_STRIDES[1]
    v += head * V_STRIDES[1] + first_row
    tiles += head * CHUNK
    vectors += head.to(tl.int64) * (4 * num_tokens)
    each_step = tl.arange(0, 4 * CHUNK) % CHUNK
    each = tl.arange(0, 4 * CHUNK) // CHUNK * num_tokens + each_step
    wide_step = step.to(tl.int64)[:, None]
    k_tile = wide_step * K_STRIDES[0] + channel[None, :]
    q_tile = wide_step * Q_STRIDES[0] + channel[None, :]
    v_tile = step.to(tl.int64)[None, :] * V_STRIDES[0] + row[:, None]
    tile = wide_step * (VALUE_HEADS * CHUNK) + step[None, :]
    place = step.to(tl.int64)[None, :] * OUT_STRIDE + row[:, None]
    triangle = step[None, :] // 8 <= step[:, None] // 8
    for chunk in tl.range(batch_row.first_chunk, batch_row.last_chunk, num_stages=STAGES):
        chunk_start, count = tokens_of_chunk(batch_row, chunk)
        filled = step < count
        t = chunk_start.to(tl.int64)
        mask = filled[:, None] & in_K[None, :]
        lower = filled[:, None] & triangle
        mask_V = filled[None, :] & in_V[:, None]
        keys = tl.load(k + t * K_STRIDES[0] + k_tile, mask=mask, other=0)
        queries = tl.load(q + t * Q_STRIDES[0] + q_tile, mask=mask, other=0)
        values = tl.load(v + t * V_STRIDES[0] + v_tile, mask=mask_V, other=0)
        inverse = tl.load(tiles + t * (VALUE_HEADS * CHUNK) + tile, mask=lower, other=0)
        scores = tl.load(tiles + (num_tokens + t) * (VALUE_HEADS * CHUNK) + tile, mask=lower, other=0)
        four = tl.load(vectors + t + each, mask=each_step < count, other=0)
        decay = tl.load(vectors + t + count - 1)
        dst = tl.load(chunk_dst + chunk)

        low, high = tl.split(tl.permute(tl.reshape(four, [2, 2, CHUNK]), (2, 1, 0)))
        _, key_decay = tl.split(low)
        query_decay, to_end = tl.split(high)
        keys, queries, read = keys.to(OPERAND), queries.to(OPERAND), operand(S, OPERAND)
        known = -key_decay[None, :] * dot(read, tl.trans(keys))
        u = dot(values.to(OPERAND), tl.trans(inverse))
        u = dot(operand(known, OPERAND), tl.trans(inverse), u)
        o = query_decay[None, :] * dot(read, tl.trans(queries))
        S = dot(operand(to_end[None, :] * u, OPERAND), keys, decay * S)
        # The compiler looks at the last product: if it has no more columns than lines, each warp has its own lines.
        o = dot(operand(u, OPERAND), tl.trans(scores), o)
        if STATE != tl.float32:
            S = S.to(STATE).to(tl.float32)
        tl.store(out + t * OUT_STRIDE + place, o.to(out.dtype.element_ty), mask=filled[None, :] & in_V[:, None])
        if dst != 0:
            store_tile(held, dst, S)


prepare = Launcher(_prepare_kernel)
scan = Launcher(_scan_kernel)
