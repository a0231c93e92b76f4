"""Gated delta rule over the prefill rows of a batch, in two Triton launches.

With norms, gates and decays outside the products, one chunk of 64 tokens maps a state S [V, K] to (one value head; rows
of q, k and v are tokens; every decay is relative to the chunk's start)

    u = (v - key_decay * (k S^T)) inverse^T,  o = query_decay * (q S^T) + u scores^T,  S = decay S + (to_end * u)^T k

The first launch prepares `inverse`, `scores` and the vectors for every chunk at once; the second carries the states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..indices import StateIndices

CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(16)  # the inverse is substituted in blocks of this size
NORM_EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)
# The smallest log decay of one token between pairs of tokens: e^-24 is nothing beside 1, and differences of larger
# sums would cancel.
MIN_PAIRWISE_LOG_DECAY = tl.constexpr(-24.0)


@triton.jit
def log2_decay(a, A_log, dt_bias):
    """g / ln 2 for g = -exp(A_log) softplus(a + dt_bias)."""
    x = a + dt_bias
    small = tl.exp(-tl.abs(x))
    one_more = 1 + small
    log1p = tl.log(one_more) + (small - (one_more - 1)) / one_more  # the second term is what the sum has rounded off
    return -tl.exp(A_log) * LOG2_E * (tl.maximum(x, 0.0) + log1p)


@triton.jit
def inverse_norm(products):
    """1 / sqrt(|x|^2 + eps) of every row x, from the diagonal of x x^T."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.rsqrt(tl.sum(tl.where(row == column, products, 0.0), axis=1) + NORM_EPS)


@triton.jit
def _split(x, PRECISE: tl.constexpr):
    """Two fp16 parts that together hold 22 bits of x, or the first alone."""
    high = x.to(tl.float16)
    if PRECISE:
        return high, (x - high.to(tl.float32)).to(tl.float16)
    else:
        return (high,)


@triton.jit
def _product(x, y, PRECISE: tl.constexpr):
    """x y in fp32 from the parts of both."""
    if PRECISE:
        return tl.dot(x[0], y[0], tl.dot(x[0], y[1], tl.dot(x[1], y[0])))
    else:
        return tl.dot(x[0], y[0])


@triton.jit
def _inverse(system, PRECISE: tl.constexpr):
    """(1 + system)^-1 for a lower triangular system [64, 64] of normalised keys and beta <= 2; its diagonal counts as 0.

    With those no entry of the system, of its inverse or of what is formed on the way exceeds 2. Diagonal blocks of 16
    are inverted by merging ever larger pairs of blocks, all of them together by forward substitution.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    block = tl.arange(0, BLOCKS)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.reshape(system, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    inner = tl.sum(tl.where(on_diagonal, blocks, 0.0), axis=2)
    inverse = tl.where(i == j, 1.0, tl.where(i ^ j == 1, -inner, 0.0))
    for level in tl.static_range(1, 4):
        pairs = tl.where((i ^ j) >> level == 1, inner, 0.0)
        parts = _split(inverse, PRECISE)
        inverse -= _product(parts, _split(_product(_split(pairs, PRECISE), parts, PRECISE), PRECISE), PRECISE)

    # system = inner + outer; (1 + system)^-1 = diagonal (1 + coupling)^-1 with coupling = outer diagonal
    diagonal = tl.where(on_diagonal, tl.reshape(inverse, [BLOCKS, BLOCK, 1, BLOCK]), 0.0)
    diagonal = _split(tl.reshape(diagonal, [CHUNK, CHUNK]), PRECISE)
    outer = tl.reshape(tl.where(on_diagonal, 0.0, blocks), [CHUNK, CHUNK])
    coupling = _product(_split(outer, PRECISE), diagonal, PRECISE)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    identity = tl.where(row == column, 1.0, 0.0)
    result = identity - coupling  # complete in the second row of blocks; every round completes another
    coupling = _split(coupling, PRECISE)
    for _ in tl.static_range(BLOCKS - 2):
        result = identity - _product(coupling, _split(result, PRECISE), PRECISE)
    return _product(diagonal, _split(result, PRECISE), PRECISE)


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
    context_len,
    chunk_seq,
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
    """A program takes one chunk of one value head."""
    OPERAND: tl.constexpr = tiles.dtype.element_ty
    PRECISE: tl.constexpr = OPERAND == tl.float32
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    seq = tl.load(chunk_seq + chunk)
    start = tl.load(chunk_start + chunk)
    in_table = chunk < tl.load(seq_chunk_start + num_prefills)
    position = tl.load(context_len + seq) + start - tl.load(query_start_loc + seq)
    count = tl.minimum(tl.load(query_start_loc + seq + 1) - start, CHUNK - position % CHUNK)
    count = tl.where(in_table, count, 0)
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
    clamped = tl.maximum(gate, MIN_PAIRWISE_LOG_DECAY * LOG2_E)
    sums = tl.cumsum(clamped, 0)
    row, column = step[:, None], step[None, :]
    pairwise = tl.exp2(tl.where(row >= column, sums[:, None] - sums[None, :], float("-inf")))

    tile = tiles + (t * VALUE_HEADS + head) * CHUNK + wide_step[:, None] * (VALUE_HEADS * CHUNK) + column
    stored = filled[:, None] & (column // 8 <= row // 8)  # 8 entries at once; the second launch masks alike
    query_norm = inverse_norm(tl.dot(queries, tl.trans(queries), input_precision="tf32x3")) * K**-0.5
    scores = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * pairwise * query_norm[:, None]
    tl.store(tile + tl.cast(num_tokens, tl.int64) * (VALUE_HEADS * CHUNK), scores.to(OPERAND), mask=stored)
    products = tl.dot(keys, tl.trans(keys), input_precision="tf32x3")
    key_norm = inverse_norm(products)
    scale = key_norm * BETA_SCALE / (1 + tl.exp(-beta))
    system = products * pairwise * key_norm[:, None] * scale[None, :]
    inverse = _inverse(system, PRECISE) * scale[:, None]
    tl.store(tile, inverse.to(OPERAND), mask=stored)

    vectors += (chunk * VALUE_HEADS + head).to(tl.int64) * (4 * CHUNK) + step
    tl.store(vectors, decay)
    tl.store(vectors + CHUNK, decay * key_norm)
    tl.store(vectors + 2 * CHUNK, decay * query_norm)
    tl.store(vectors + 3 * CHUNK, tl.exp2(tl.sum(clamped, 0) - sums))


@triton.jit(do_not_specialize=["slot_stride", "num_prefills", "num_tokens"])
def _scan_kernel(
    q,
    k,
    v,
    tiles,
    vectors,
    state,
    out,
    query_start_loc,
    context_len,
    src,
    chunk_dst,
    seq_chunk_start,
    longest_first,
    slot_stride,
    num_prefills,
    num_tokens,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program carries BLOCK_V rows of one value head's state through all chunks of one sequence."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    OPERAND: tl.constexpr = tiles.dtype.element_ty
    STATE: tl.constexpr = state.dtype.element_ty
    head = tl.program_id(0) // TILES
    first_row = tl.program_id(0) % TILES * BLOCK_V
    row = tl.arange(0, BLOCK_V)
    step = tl.arange(0, CHUNK)
    wide_step = step.to(tl.int64)
    in_V = first_row + row < V
    out += head * V + first_row

    if tl.program_id(1) == num_prefills:  # tokens that belong to no row
        for start in range(tl.load(query_start_loc + num_prefills), num_tokens, CHUNK):
            token = tl.cast(start, tl.int64) + step
            empty = tl.zeros([CHUNK, BLOCK_V], out.dtype.element_ty)
            place = out + token[:, None] * (VALUE_HEADS * V) + row[None, :]
            tl.store(place, empty, mask=(token < num_tokens)[:, None] & in_V[None, :])
        return

    seq = tl.load(longest_first + tl.program_id(1))
    start = tl.load(query_start_loc + seq)
    end = tl.load(query_start_loc + seq + 1)
    first_chunk = tl.load(seq_chunk_start + seq)
    last_chunk = tl.load(seq_chunk_start + seq + 1)
    origin = start - tl.load(context_len + seq) % CHUNK

    # Rows in pieces of 16 channels: less shared memory goes between the layouts of products and of loads and stores.
    piece = tl.arange(0, BLOCK_K // 16)[None, :, None]
    element = (first_row + row)[:, None, None] * K + piece * 16 + tl.arange(0, 16)[None, None, :]
    inside = in_V[:, None, None] & (piece * 16 < K)
    state += head * V * K
    slot_stride = tl.cast(slot_stride, tl.int64) * (128 // STATE.primitive_bitwidth)  # given in units of 16 bytes
    slot = tl.load(src + seq)
    S = tl.load(state + slot * slot_stride + element, mask=tl.where(slot != 0, inside, False), other=0).to(tl.float32)
    S = tl.reshape(S, [BLOCK_V, BLOCK_K])

    channel = tl.arange(0, BLOCK_K)
    in_K = channel < K
    q += head // (VALUE_HEADS // HEADS) * Q_STRIDES[1]
    k += head // (VALUE_HEADS // HEADS) * K_STRIDES[1]
    v += head * V_STRIDES[1] + first_row
    tiles += head * CHUNK
    vectors += head * (4 * CHUNK)
    triangle = step[None, :] // 8 <= step[:, None] // 8
    for chunk in tl.range(first_chunk, last_chunk, num_stages=STAGES):
        boundary = origin + (chunk - first_chunk) * CHUNK
        chunk_start = tl.maximum(boundary, start)
        filled = step < tl.minimum(boundary + CHUNK, end) - chunk_start
        t = chunk_start.to(tl.int64)
        mask = filled[:, None] & in_K[None, :]
        lower = filled[:, None] & triangle
        mask_V = filled[None, :] & in_V[:, None]
        keys = tl.load(k + t * K_STRIDES[0] + wide_step[:, None] * K_STRIDES[0] + channel[None, :], mask=mask, other=0)
        queries = tl.load(q + t * Q_STRIDES[0] + wide_step[:, None] * Q_STRIDES[0] + channel[None, :], mask=mask, other=0)
        values = tl.load(v + t * V_STRIDES[0] + wide_step[None, :] * V_STRIDES[0] + row[:, None], mask=mask_V, other=0)
        tile = tiles + t * (VALUE_HEADS * CHUNK)
        inverse = tl.load(tile + wide_step[:, None] * (VALUE_HEADS * CHUNK) + step[None, :], mask=lower, other=0)
        tile += tl.cast(num_tokens, tl.int64) * (VALUE_HEADS * CHUNK)
        scores = tl.load(tile + wide_step[:, None] * (VALUE_HEADS * CHUNK) + step[None, :], mask=lower, other=0)
        vector = vectors + tl.cast(chunk, tl.int64) * (VALUE_HEADS * 4 * CHUNK)
        decay = tl.load(vector + CHUNK - 1)
        key_decay = tl.load(vector + CHUNK + step)
        query_decay = tl.load(vector + 2 * CHUNK + step)
        to_end = tl.load(vector + 3 * CHUNK + step)
        dst = tl.load(chunk_dst + chunk)

        keys, queries, read = keys.to(OPERAND), queries.to(OPERAND), S.to(OPERAND)
        residual = values - key_decay[None, :] * tl.dot(read, tl.trans(keys), input_precision="tf32x3")
        u = tl.dot(residual.to(OPERAND), tl.trans(inverse), input_precision="tf32x3")
        o = query_decay[None, :] * tl.dot(read, tl.trans(queries), input_precision="tf32x3")
        o = tl.dot(u.to(OPERAND), tl.trans(scores), o, input_precision="tf32x3")
        S = tl.dot((to_end[None, :] * u).to(OPERAND), keys, decay * S, input_precision="tf32x3")
        if STATE != tl.float32:
            S = S.to(STATE).to(tl.float32)
        place = out + t * (VALUE_HEADS * V) + wide_step[None, :] * (VALUE_HEADS * V) + row[:, None]
        tl.store(place, o.to(out.dtype.element_ty), mask=mask_V)
        if dst != 0:
            pieces = tl.reshape(S, [BLOCK_V, BLOCK_K // 16, 16])
            tl.store(state + dst * slot_stride + element, pieces.to(STATE), mask=inside)


def token_strides(x: Tensor) -> tuple[int, int]:
    """Strides of [F, heads, ...]. They are constants to the compiler, so one token has those of a dense tensor."""
    return (x.stride(0) if x.shape[0] > 1 else x[0].numel(), x.stride(1))


def prefill(
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
    """Fills the prefill and padding tokens of `out` [F, HV, V] and stores states where `chunk_dst` says."""
    num_tokens, heads, K = q.shape
    value_heads, V = v.shape[1:]
    block_K = triton.next_power_of_2(K)
    chunks = indices.chunk_seq.shape[0]
    narrow = q.dtype == torch.bfloat16
    tiles = q.new_empty(2 * num_tokens * value_heads * 64, dtype=q.dtype if narrow else torch.float32)
    vectors = q.new_empty(chunks * value_heads * 4 * 64, dtype=torch.float32)
    if chunks:
        _prepare_kernel[value_heads, chunks](
            q,
            k,
            a,
            b,
            A_log,
            dt_bias,
            tiles,
            vectors,
            indices.query_start_loc,
            indices.context_len,
            indices.chunk_seq,
            indices.chunk_start,
            indices.seq_chunk_start,
            indices.num_prefills,
            num_tokens,
            BETA_SCALE=beta_scale,
            Q_STRIDES=token_strides(q),
            K_STRIDES=token_strides(k),
            A_STRIDES=token_strides(a),
            B_STRIDES=token_strides(b),
            HEADS=heads,
            VALUE_HEADS=value_heads,
            K=K,
            BLOCK_K=block_K,
            num_warps=4,
            num_stages=1,
        )
    block_V = 64
    _scan_kernel[value_heads * triton.cdiv(V, block_V), indices.num_prefills + 1](
        q,
        k,
        v,
        tiles,
        vectors,
        state,
        out,
        indices.query_start_loc,
        indices.context_len,
        indices.src,
        indices.chunk_dst,
        indices.seq_chunk_start,
        indices.longest_first,
        state.stride(0) * state.element_size() // 16,
        indices.num_prefills,
        num_tokens,
        Q_STRIDES=token_strides(q),
        K_STRIDES=token_strides(k),
        V_STRIDES=token_strides(v),
        HEADS=heads,
        VALUE_HEADS=value_heads,
        K=K,
        V=V,
        BLOCK_K=block_K,
        BLOCK_V=block_V,
        STAGES=2 if narrow else 1,
        num_warps=4,
    )
