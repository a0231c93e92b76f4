"""Run both launches of prefill in Triton.

The inverse of a decay per channel may overflow. So a pair of tokens meets at a token between them: both decays up to
there are at most 1. Products of the second launch are transposed, so left operands are already in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.chunks import CHUNK, SECTOR, chunk_tokens, clear_padding, prefill_row, row_and_tile, tokens_of_chunk
from ..common.decays import LOG2_E, log2_softplus
from ..common.delta_rule import NORM_EPS, dot, log2_decay, operand, unit_lower_inverse
from ..common.launch import Launcher
from ..common.layout import slot_elements
from ..common.prefetch import later_tile, prefetch
from ..common.state_tile import load_tile, state_tile, store_tile
from .prefill_hopper_pairs import MAX_FACTORED_DECAY
from .token_tile import TokenTile, column_channels, load_tokens, store_tokens, token_tile

MIN_LOG2_DECAY = tl.constexpr(-256.0)  # per token: 2^-256 is 0 in fp32, and sums stay finite
# Small in fp32, since exponents are rounded too, and in fp16, which has few of them.
MAX_PRECISE_FACTORED_DECAY = tl.constexpr(4.0)


@triton.jit
def _log2_decays(g, A_log, dt_bias, PRECISE: tl.constexpr):
    """Return bounded `log2_decay`, without a logarithm for 16-bit operands."""
    if PRECISE:
        return tl.maximum(log2_decay(g, A_log, dt_bias), MIN_LOG2_DECAY)
    else:
        softplus = log2_softplus(g * LOG2_E + dt_bias * LOG2_E)
        return tl.maximum(-tl.exp(A_log) * softplus, MIN_LOG2_DECAY)


@triton.jit
def _two_factors(x):
    """Split x into a power of two, exact in every dtype, and the rest."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return power, x / power


@triton.jit
def _scaled(x, factor):
    """Multiply in the dtype of x: packed arithmetic is faster than fp32."""
    return x * factor.to(x.dtype)


@triton.jit
def _inner_products(q, k, count, STRIDES: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return each token's q q, k k and q k [64]."""
    tile = token_tile(0, count, K, BLOCK_K)
    queries = load_tokens(tile, q, STRIDES[0][0]).to(tl.float32)
    keys = load_tokens(tile, k, STRIDES[1][0]).to(tl.float32)
    return tl.sum(queries * queries, axis=1), tl.sum(keys * keys, axis=1), tl.sum(queries * keys, axis=1)


@triton.jit
def _sums(signs, high, low):
    """Return signs (high + low), sums of log decays; `low` may be None."""
    sums = tl.dot(signs, high)
    return sums if low is None else tl.dot(signs, low, sums)


@triton.jit
def _from_middle(high, low, span):
    """Return log decays between a span's middle and each token [64, C], negated before the middle."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    start = column & -span
    middle = start + tl.maximum(span // 2, 1)
    upper = column >= middle
    # Per column: lines take more registers.
    first, last = tl.where(upper, column, start), tl.where(upper, start + span - 1, column - 1)
    sign = tl.where(upper, 1.0, -1.0).to(tl.float16)
    return _sums(tl.where((row >= first) & (row <= last), sign, tl.zeros([1, 1], tl.float16)), high, low)


@triton.jit
def _add_pair_products(qk, kk, q, k, high, low, LIMIT: tl.constexpr):
    """Add q k^T and k k^T [64, 64] for j <= i, every channel decayed from token j (columns) to token i.

    Pairs from different halves of a span of 64, 32, ... tokens meet in its middle. Halving ends once all factors are in
    range. Other chunks must not matter.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    span = CHUNK
    exponent = _from_middle(high, low, span)
    while tl.max(tl.abs(exponent)) > LIMIT:
        factor = tl.exp2(-tl.abs(exponent))
        right = _scaled(k, factor)
        start = row & -span
        middle = start + span // 2
        met = (column >= start) & (column < tl.where(row >= middle, middle, 0))
        qk = tl.where(met, dot(_scaled(q, factor), tl.trans(right), qk), qk)
        kk = tl.where(met, dot(right, tl.trans(right), kk), kk)
        span //= 2
        exponent = _from_middle(high, low, span)
    right = tl.trans(_scaled(k, tl.exp2(-exponent)))
    factor = tl.exp2(exponent)
    met = (column >= (row & -span)) & (column <= row)
    qk = tl.where(met, dot(_scaled(q, factor), right, qk), qk)
    kk = tl.where(met, dot(_scaled(k, factor), right, kk), kk)
    return qk, kk


@triton.jit(do_not_specialize=["num_prefills", "num_tokens"])
def _prepare_kernel(
    q,
    k,
    g,
    b,
    A_log,
    dt_bias,
    tiles,
    operands,
    totals,
    query_start_loc,
    chunk_start,
    seq_chunk_start,
    num_prefills,
    num_tokens,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    OPERAND: tl.constexpr = tiles.dtype.element_ty
    PRECISE: tl.constexpr = OPERAND == tl.float32
    chunk, head = row_and_tile(HEADS)
    start, count = chunk_tokens(chunk, query_start_loc, chunk_start, seq_chunk_start, num_prefills, HEADS)
    step = tl.arange(0, CHUNK)
    filled = step < count
    t = start.to(tl.int64)
    row, column = step[:, None], step[None, :]

    q += t * STRIDES[0][0] + head * STRIDES[0][1]
    k += t * STRIDES[1][0] + head * STRIDES[1][1]
    g += t * STRIDES[2][0] + head * STRIDES[2][1]
    b += t * B_STRIDES[0] + head * B_STRIDES[1]
    beta = tl.load(b + row * B_STRIDES[0], mask=filled[:, None], other=0).to(tl.float32)
    beta = tl.sum(1 / (1 + tl.exp(-beta)), axis=1)  # else computed in every layout
    rate = tl.load(A_log + head).to(tl.float32)
    place = head.to(tl.int64) * num_tokens + t
    operands += place * K
    size = tl.cast(num_tokens, tl.int64) * (HEADS * K)
    totals += (chunk.to(tl.int64) * HEADS + head) * K
    one, zero = tl.full([1, 1], 1, tl.float16), tl.zeros([1, 1], tl.float16)
    before, after = tl.where(column <= row, one, zero), tl.where(column > row, one, zero)
    LIMIT: tl.constexpr = (MAX_FACTORED_DECAY if OPERAND == tl.bfloat16 else MAX_PRECISE_FACTORED_DECAY) * LOG2_E
    prefetch(g + tl.minimum(row, tl.maximum(count - 1, 0)) * STRIDES[2][0], BLOCK_K)
    qq, kk, qk = _inner_products(q, k, count, STRIDES, K, BLOCK_K)
    q_power, q_norm = _two_factors(tl.rsqrt(qq + NORM_EPS) * K**-0.5)
    k_power, k_norm = _two_factors(tl.rsqrt(kk + NORM_EPS))
    scores, products = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in tl.range(0, K, BLOCK_C, num_stages=1):
        channel = first + column_channels(BLOCK_C)
        tile = token_tile(first, count, K, BLOCK_C)
        gates = load_tokens(tile, g, STRIDES[2][0], float("-inf")).to(tl.float32)
        queries = load_tokens(tile, q, STRIDES[0][0]).to(OPERAND)
        keys = load_tokens(tile, k, STRIDES[1][0]).to(OPERAND)
        bias = tl.load(dt_bias + head * K + channel, mask=channel < K, other=0).to(tl.float32)
        queries, keys = _scaled(queries, q_power[:, None]), _scaled(keys, k_power[:, None])
        log_decays = _log2_decays(gates, rate, bias[None, :], PRECISE)
        # bf16 operands have 8 bits, so 11 bits of log decays do; fp16 operands need 22.
        high = log_decays.to(tl.float16)
        low = None if OPERAND == tl.bfloat16 else (log_decays - high.to(tl.float32)).to(tl.float16)
        from_start = tl.exp2(_sums(before, high, low))
        last = TokenTile(tile.step, tile.channel, (tile.step == CHUNK - 1) & (tile.channel < K))
        store_tokens(last, totals, 0, from_start)
        store_tokens(tile, operands, K, _scaled(keys, k_norm[:, None] * from_start))
        store_tokens(tile, operands + size, K, _scaled(queries, q_norm[:, None] * from_start))
        to_end = tl.exp2(_sums(after, high, low))
        store_tokens(tile, operands + 2 * size, K, _scaled(keys, k_norm[:, None] * to_end))
        scores, products = _add_pair_products(scores, products, queries, keys, high, low, LIMIT)

    scores *= q_norm[:, None] * k_norm[None, :]
    if not PRECISE:  # no decay rounds a token's product with itself
        own = qk * (q_power * q_norm) * (k_power * k_norm)
        scores = tl.where(row == column, own[:, None], scores)
    products *= k_norm[:, None] * (k_norm * beta)[None, :]
    tile = tiles + place * CHUNK + row * CHUNK + column
    stored = filled[:, None] & (column // SECTOR <= row // SECTOR)  # the second launch loads no more
    tl.store(tile + tl.cast(num_tokens, tl.int64) * (HEADS * CHUNK), scores.to(OPERAND), mask=stored)
    inverse = unit_lower_inverse(products, OPERAND) * beta[:, None]
    tl.store(tile, inverse.to(OPERAND), mask=stored)


prepare = Launcher(_prepare_kernel)


@triton.jit(do_not_specialize=["num_prefills", "slot_stride", "num_tokens"])
def _scan_kernel(
    v,
    tiles,
    operands,
    totals,
    state,
    out,
    query_start_loc,
    rows,
    chunk_dst,
    num_prefills,
    slot_stride,
    num_tokens,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    V_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    CONCURRENT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Carry BLOCK_V lines of one head's state per program through one row's chunks."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    OPERAND: tl.constexpr = tiles.dtype.element_ty
    STATE: tl.constexpr = state.dtype.element_ty
    sequence, index = row_and_tile(HEADS * TILES)
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
    later_state = later_tile(state, rows, num_prefills, slot_stride, sequence, index, HEADS * TILES, V * K, CONCURRENT)

    held = state_tile(state, slot_stride, head, first_row, V, K, BLOCK_V, BLOCK_K)
    S = load_tile(held, batch_row.slot)

    if BLOCK_V == V and BLOCK_K == K:
        prefetch(later_state, V * K)

    channel = tl.arange(0, BLOCK_K)
    in_K = channel < K
    wide_tokens = tl.cast(num_tokens, tl.int64)
    v += head * V_STRIDES[1] + first_row
    tiles += head * wide_tokens * CHUNK
    operands += head * wide_tokens * K
    totals += head * K
    wide_step = step.to(tl.int64)[:, None]
    v_tile = step.to(tl.int64)[None, :] * V_STRIDES[0] + row[:, None]
    operand_tile = wide_step * K + channel[None, :]
    tile = wide_step * CHUNK + step[None, :]
    place = step.to(tl.int64)[None, :] * OUT_STRIDE + row[:, None]
    triangle = step[None, :] // 8 <= step[:, None] // 8
    for chunk in tl.range(batch_row.first_chunk, batch_row.last_chunk, num_stages=STAGES):
        chunk_start, count = tokens_of_chunk(batch_row, chunk)
        filled = step < count
        t = chunk_start.to(tl.int64)
        mask = filled[:, None] & in_K[None, :]
        lower = filled[:, None] & triangle
        mask_V = filled[None, :] & in_V[:, None]
        k_in = tl.load(operands + t * K + operand_tile, mask=mask, other=0)
        q_in = tl.load(operands + wide_tokens * (HEADS * K) + t * K + operand_tile, mask=mask, other=0)
        k_out = tl.load(operands + wide_tokens * (2 * HEADS * K) + t * K + operand_tile, mask=mask, other=0)
        values = tl.load(v + t * V_STRIDES[0] + v_tile, mask=mask_V, other=0)
        inverse = tl.load(tiles + t * CHUNK + tile, mask=lower, other=0)
        scores = tl.load(tiles + (wide_tokens * HEADS + t) * CHUNK + tile, mask=lower, other=0)
        decay = tl.load(totals + tl.cast(chunk, tl.int64) * (HEADS * K) + channel, mask=in_K, other=0)
        dst = tl.load(chunk_dst + chunk)

        read = operand(S, OPERAND)
        known = -dot(read, tl.trans(k_in))
        u = dot(values.to(OPERAND), tl.trans(inverse))
        u = dot(operand(known, OPERAND), tl.trans(inverse), u)
        o = dot(read, tl.trans(q_in))
        u = operand(u, OPERAND)
        S = dot(u, k_out, decay[None, :] * S)
        # The compiler looks at the last product: if it has no more columns than lines, each warp has its own lines.
        o = dot(u, tl.trans(scores), o)
        if STATE != tl.float32:
            S = S.to(STATE).to(tl.float32)
        tl.store(out + t * OUT_STRIDE + place, o.to(out.dtype.element_ty), mask=filled[None, :] & in_V[:, None])
        if dst != 0:
            store_tile(held, dst, S)


scan = Launcher(_scan_kernel)
