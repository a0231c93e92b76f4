"""Prepare all chunks of a batch for Kimi Delta Attention: decays, pair products and inverses.

The inverse of a decay per channel may overflow. So a pair of tokens meets at a token between them: both decays up to
there are at most 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.chunks import CHUNK, CHUNK_ARRAYS, chunk_tokens, row_and_tile
from ..common.decays import LOG2_E, log2_softplus
from ..common.delta_rule import dot, inverse_norms, log2_decay, unit_lower_inverse
from ..common.hopper import served
from ..common.launch import Launcher, index_pointers
from ..common.layout import layer_strides, power_of_2
from .hopper_pairs import MAX_FACTORED_DECAY
from .hopper_prepare import prepare as hopper_prepare

MIN_LOG2_DECAY = tl.constexpr(-256.0)  # per token: 2^-256 is 0 in fp32, and sums stay finite
# Small in fp32, since exponents are rounded too.
MAX_PRECISE_FACTORED_DECAY = tl.constexpr(4.0)


@triton.jit
def _log2_decays(g, A_log, dt_bias, PRECISE: tl.constexpr):
    """Return bounded `log2_decay`, without its logarithm if operands are rounded to 16 bits."""
    if PRECISE:
        return tl.maximum(log2_decay(g, A_log, dt_bias), MIN_LOG2_DECAY)
    else:
        softplus = log2_softplus(g * LOG2_E + dt_bias * LOG2_E)
        return tl.maximum(-tl.exp(A_log) * softplus, MIN_LOG2_DECAY)


@triton.jit
def _two_factors(x):
    """Split x into a power of two, exact in every dtype, and a factor from 1 to 2."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return power, x / power


@triton.jit
def _scaled(x, factor):
    """Multiply in the dtype of x: packed arithmetic is faster than fp32."""
    return x * factor.to(x.dtype)


@triton.jit
def _parts(x):
    """Split x into two fp16 parts that together hold 22 bits."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _sums(signs, parts):
    return tl.dot(signs, parts[1], tl.dot(signs, parts[0]))


@triton.jit
def _from_middle(parts, span):
    """Return log decays between the middle of a span and each of its tokens [64, C], negated before the middle."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    start = column & -span
    middle = start + tl.maximum(span // 2, 1)
    upper = column >= middle
    # Per column: lines take more registers.
    first, last = tl.where(upper, column, start), tl.where(upper, start + span - 1, column - 1)
    sign = tl.where(upper, 1.0, -1.0).to(tl.float16)
    return _sums(tl.where((row >= first) & (row <= last), sign, tl.zeros([1, 1], tl.float16)), parts)


@triton.jit
def _add_pair_products(qk, kk, q, k, parts, LIMIT: tl.constexpr):
    """Add q k^T and k k^T [64, 64] for j <= i, every channel decayed from token j (columns) to token i.

    Pairs from different halves of a span of 64, 32, ... tokens meet in its middle. Halving ends once the factors of all
    pairs of a span are in range. Only the chunk's decays decide, not the batch.
    """
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    span = CHUNK
    exponent = _from_middle(parts, span)
    while tl.max(tl.abs(exponent)) > LIMIT:
        factor = tl.exp2(-tl.abs(exponent))
        right = _scaled(k, factor)
        start = row & -span
        middle = start + span // 2
        met = (column >= start) & (column < tl.where(row >= middle, middle, 0))
        qk = tl.where(met, dot(_scaled(q, factor), tl.trans(right), qk), qk)
        kk = tl.where(met, dot(right, tl.trans(right), kk), kk)
        span //= 2
        exponent = _from_middle(parts, span)
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
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    G_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
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

    q += t * Q_STRIDES[0] + head * Q_STRIDES[1]
    k += t * K_STRIDES[0] + head * K_STRIDES[1]
    g += t * G_STRIDES[0] + head * G_STRIDES[1]
    b += t * B_STRIDES[0] + head * B_STRIDES[1]
    beta = tl.load(b + row * B_STRIDES[0], mask=filled[:, None], other=0).to(tl.float32)
    beta = tl.sum(1 / (1 + tl.exp(-beta)), axis=1)  # the sum prevents a computation in every layout
    rate = tl.load(A_log + head).to(tl.float32)
    place = head.to(tl.int64) * num_tokens + t
    operands += place * K
    size = tl.cast(num_tokens, tl.int64) * (HEADS * K)
    totals += (chunk.to(tl.int64) * HEADS + head) * K
    one, zero = tl.full([1, 1], 1, tl.float16), tl.zeros([1, 1], tl.float16)
    before, after = tl.where(column <= row, one, zero), tl.where(column > row, one, zero)
    LIMIT: tl.constexpr = (MAX_PRECISE_FACTORED_DECAY if PRECISE else MAX_FACTORED_DECAY) * LOG2_E
    q += row * Q_STRIDES[0]
    k += row * K_STRIDES[0]
    g += row * G_STRIDES[0]
    operands += row * K
    qq, kk = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    qk = tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in tl.range(0, K, BLOCK_C, num_stages=1):
        channel = first + tl.arange(0, BLOCK_C)[None, :]
        mask = filled[:, None] & (channel < K)
        queries = tl.load(q + channel, mask=mask, other=0).to(OPERAND)
        keys = tl.load(k + channel, mask=mask, other=0).to(OPERAND)
        qq = dot(queries, tl.trans(queries), qq)
        kk = dot(keys, tl.trans(keys), kk)
        if not PRECISE:
            qk = dot(queries, tl.trans(keys), qk)
    q_power, q_norm = _two_factors(inverse_norms(qq) * K**-0.5)
    k_power, k_norm = _two_factors(inverse_norms(kk))
    scores, products = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for first in tl.range(0, K, BLOCK_C, num_stages=1):
        channel = first + tl.arange(0, BLOCK_C)
        in_K = channel < K
        mask = filled[:, None] & in_K[None, :]
        gates = tl.load(g + channel[None, :], mask=mask, other=float("-inf")).to(tl.float32)
        queries = tl.load(q + channel[None, :], mask=mask, other=0).to(OPERAND)
        keys = tl.load(k + channel[None, :], mask=mask, other=0).to(OPERAND)
        bias = tl.load(dt_bias + head * K + channel, mask=in_K, other=0).to(tl.float32)
        queries, keys = _scaled(queries, q_power[:, None]), _scaled(keys, k_power[:, None])
        decays = _log2_decays(gates, rate, bias[None, :], PRECISE)
        tl.store(totals + channel, tl.exp2(tl.sum(decays, axis=0)), mask=in_K)
        parts = _parts(decays)
        from_start = tl.exp2(_sums(before, parts))
        operand = operands + channel[None, :]
        tl.store(operand, _scaled(keys, k_norm[:, None] * from_start), mask=mask)
        tl.store(operand + size, _scaled(queries, q_norm[:, None] * from_start), mask=mask)
        to_end = tl.exp2(_sums(after, parts))
        tl.store(operand + 2 * size, _scaled(keys, k_norm[:, None] * to_end), mask=mask)
        scores, products = _add_pair_products(scores, products, queries, keys, parts, LIMIT)

    scores *= q_norm[:, None] * k_norm[None, :]
    if not PRECISE:  # no decay rounds a token's product with itself
        own = qk * (q_power * q_norm)[:, None] * (k_power * k_norm)[None, :]
        scores = tl.where(row == column, own, scores)
    products *= k_norm[:, None] * (k_norm * beta)[None, :]
    tile = tiles + place * CHUNK + row * CHUNK + column
    stored = filled[:, None] & (column // 8 <= row // 8)  # as the second launch masks
    tl.store(tile + tl.cast(num_tokens, tl.int64) * (HEADS * CHUNK), scores.to(OPERAND), mask=stored)
    inverse = unit_lower_inverse(products, OPERAND) * beta[:, None]
    tl.store(tile, inverse.to(OPERAND), mask=stored)


_prepare = Launcher(_prepare_kernel)


def prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    indices: StateIndices,
    programs: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return `inverse` and `scores`; k_in, q_in and k_out; `decay`; and flags or None.

    Flags, a turn counter and then a flag per chunk and head, let the second launch begin early. Scratch in bytes: 256 +
    6 K per token and head for bf16 activations, else 512 + 12 K; at most 4 K + 4 per chunk and head.
    """
    num_tokens, heads, K = q.shape
    num_chunks = indices.chunk_seq.shape[0]
    operand = q.dtype if q.dtype == torch.bfloat16 else torch.float32
    tiles = q.new_empty(2 * num_tokens * heads * 64, dtype=operand)
    operands = q.new_empty(3 * num_tokens * heads * K, dtype=operand)
    totals = q.new_empty(num_chunks * heads * K, dtype=torch.float32)
    q_strides, k_strides, g_strides, b_strides = layer_strides(q, k, g, b)
    tasks = heads * num_chunks
    if tasks and K <= 128 and served((q, k, g), (q_strides, k_strides, g_strides)):
        flags = q.new_empty(1 + tasks, dtype=torch.int32)
        hopper_prepare(
            min(tasks, max(programs, 1)),
            (q, k, g, b, A_log, dt_bias, tiles, operands, totals, flags),
            index_pointers(indices, CHUNK_ARRAYS),
            (indices.num_prefills, num_tokens, num_chunks),
            {
                "STRIDES": (q_strides, k_strides, g_strides),
                "B_STRIDES": b_strides,
                "HEADS": heads,
                "K": K,
                "BLOCK_K": padded_width(K, operand),
            },
            num_warps=4,
            maxnreg=168,
        )
        return tiles, operands, totals, flags
    if tasks:
        _prepare(
            tasks,
            (q, k, g, b, A_log, dt_bias, tiles, operands, totals),
            index_pointers(indices, CHUNK_ARRAYS),
            (indices.num_prefills, num_tokens),
            {
                "Q_STRIDES": q_strides,
                "K_STRIDES": k_strides,
                "G_STRIDES": g_strides,
                "B_STRIDES": b_strides,
                "HEADS": heads,
                "K": K,
                "BLOCK_C": min(padded_width(K, operand), 128 if operand == torch.bfloat16 else 64),
            },
            num_warps=4,
        )
    return tiles, operands, totals, None


def padded_width(K: int, operand: torch.dtype) -> int:
    """Return the channels of a tile: at least 64 in fp32, at least 16 in bf16.

    For narrower fp32 tiles, ptxas 12.8 (in Triton 3.6) assembles the first launch wrongly: it reads a uniform register
    that nothing has written. `tests/sass.py` finds such reads.
    """
    return max(power_of_2(K), 16 if operand == torch.bfloat16 else 64)
