"""Run the gated delta rule (arXiv:2412.06464) over the prefill rows of a batch, in one or two launches.

A chunk of 64 tokens, the lines of q, k and v, takes the state S [V, K] of a value head through

    u = inverse (v - key_decay * (k S^T));  o = query_decay * (q S^T) + scores u;  S = decay S + (to_end * u)^T k

The first launch computes `inverse`, `scores` and the vectors of all chunks at once. The second carries the states. Its
products are transposed, so that each left operand is already in registers.

For bf16 activations both launches are in Gluon (`prepare`, `scan`) and overlap. Batches that keep all processors busy
take one launch (`fused`). The Triton kernels here serve other inputs and, in the first launch, betas above 1.

Each line of `inverse` includes its token's beta and key norm, unless betas may exceed 1. Betas near 2 nearly reflect
the state: if keys have one direction, a rounded `inverse` makes the state grow in each chunk. Then `scores` and
`to_end` include beta and norm instead, and `inverse` has exact ones on its diagonal and more digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import processors
from ...indices import StateIndices
from ..common.chunks import (
    CHUNK,
    CHUNK_ARRAYS,
    ROW_ARRAYS,
    chunk_tokens,
    clear_padding,
    keep_busy,
    prefill_row,
    row_and_tile,
    tokens_of_chunk,
)
from ..common.decays import pairwise_decays
from ..common.delta_rule import dot, inverse_norms, log2_decay, unit_lower_inverse
from ..common.hopper import served
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, layer_strides, power_of_2, slot_elements, slot_stride
from ..common.prefetch import later_tile, prefetch
from ..common.state_tile import load_tile, state_tile, store_tile
from .fused import BLOCK_V as FUSED_BLOCK_V
from .fused import CARRYING, fused
from .prepare import prepare
from .scan import scan


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
    pairwise = pairwise_decays(gate, PRECISE)
    row, column = step[:, None], step[None, :]

    tile = tiles + (t * VALUE_HEADS + head) * CHUNK + wide_step[:, None] * (VALUE_HEADS * CHUNK) + column
    score_tile = tile + tl.cast(num_tokens, tl.int64) * (VALUE_HEADS * CHUNK)
    stored = filled[:, None] & (column // 8 <= row // 8)  # as the second launch masks
    query_norm = inverse_norms(dot(queries, tl.trans(queries))) * K**-0.5
    scores = dot(queries, tl.trans(keys)) * pairwise * query_norm[:, None]
    if not REFLECTING:
        tl.store(score_tile, scores.to(OPERAND), mask=stored)
    products = dot(keys, tl.trans(keys))
    key_norm = inverse_norms(products)
    scale = key_norm * BETA_SCALE / (1 + tl.exp(-beta))
    system = products * pairwise * key_norm[:, None] * scale[None, :]
    if REFLECTING:
        tl.store(score_tile, (scores * scale[None, :]).to(OPERAND), mask=stored)
    # For betas above 1 bf16 has too few digits, and TF32 is slow. fp16 loses entries below 2^-24: beside states of
    # 1e20, a chunk's late tokens are inexact.
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
    """Carry BLOCK_V lines of one value head's state per program through all chunks of one sequence."""
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
    v_tile = wide_step * V_STRIDES[0] + row[None, :]
    tile = wide_step * (VALUE_HEADS * CHUNK) + step[None, :]
    place = step.to(tl.int64)[None, :] * OUT_STRIDE + row[:, None]
    triangle = step[None, :] // 8 <= step[:, None] // 8
    for chunk in tl.range(batch_row.first_chunk, batch_row.last_chunk, num_stages=STAGES):
        chunk_start, count = tokens_of_chunk(batch_row, chunk)
        filled = step < count
        t = chunk_start.to(tl.int64)
        mask = filled[:, None] & in_K[None, :]
        lower = filled[:, None] & triangle
        mask_V = filled[:, None] & in_V[None, :]
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
        keys, queries, read = keys.to(OPERAND), queries.to(OPERAND), S.to(OPERAND)
        known = -key_decay[None, :] * dot(read, tl.trans(keys))
        u = dot(tl.trans(values.to(OPERAND)), tl.trans(inverse))
        u = dot(known.to(OPERAND), tl.trans(inverse), u)
        o = query_decay[None, :] * dot(read, tl.trans(queries))
        o = dot(u.to(OPERAND), tl.trans(scores), o)
        S = dot((to_end[None, :] * u).to(OPERAND), keys, decay * S)
        if STATE != tl.float32:
            S = S.to(STATE).to(tl.float32)
        tl.store(out + t * OUT_STRIDE + place, o.to(out.dtype.element_ty), mask=filled[None, :] & in_V[:, None])
        if dst != 0:
            store_tile(held, dst, S)


_prepare = Launcher(_prepare_kernel)
_scan = Launcher(_scan_kernel)


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
    """Fill prefill and padding tokens of `out` [F, HV, V] and store states at `chunk_dst`.

    Scratch of two launches: 272 bytes per token and value head for bf16, else 528; 4 per chunk and value head.
    """
    num_tokens, heads, K = q.shape
    value_heads, V = v.shape[1:]
    q_strides, k_strides, v_strides, a_strides, b_strides = layer_strides(q, k, v, a, b)
    strides = {"Q_STRIDES": q_strides, "K_STRIDES": k_strides}
    gate_strides = {"A_STRIDES": a_strides, "B_STRIDES": b_strides}
    shape = {"HEADS": heads, "VALUE_HEADS": value_heads, "K": K, "BLOCK_K": power_of_2(K)}
    rows = index_pointers(indices, ROW_ARRAYS)
    numbers = indices.num_prefills, slot_stride(state), num_tokens
    narrow = q.dtype == torch.bfloat16
    hopper = K <= 128 and served((q, k, v), (q_strides, k_strides, v_strides))
    concurrent = processors(q.get_device())  # a processor runs one program of 128 lines
    # Tiles of 64 lines if all run at once, else of 128 lines, which read q and k half as often.
    few = value_heads * cdiv(V, 64) * indices.num_prefills <= concurrent
    block_V = 64 if V <= 64 or few else 128
    num_chunks = indices.chunk_seq.shape[0]
    gluon_prepare = hopper and beta_scale <= 1
    tiles_of_row = value_heads * cdiv(V, block_V)
    # Per chunk, one launch takes nearly twice the time of `scan`: it pays only if most processors are busy.
    if gluon_prepare and block_V == FUSED_BLOCK_V.value and keep_busy(indices, tiles_of_row, max(concurrent, 1)):
        fused(
            max(min(tiles_of_row * indices.num_prefills, concurrent), 1),
            (q, k, v, a, b, A_log, dt_bias, state, out),
            rows,
            numbers,
            {**strides, "V_STRIDES": v_strides, **gate_strides, "OUT_STRIDE": out.stride(0), **shape, "V": V},
            num_warps=CARRYING.value,
        )
        return
    tiles = q.new_empty(2 * num_tokens * value_heads * 64, dtype=q.dtype if narrow else torch.float32)
    vectors = q.new_empty(4 * num_tokens * value_heads, dtype=torch.float32)
    tasks = value_heads * num_chunks
    flags = q.new_empty(tasks, dtype=torch.int32) if gluon_prepare and tasks else None
    if flags is not None:
        # A second launch of few programs needs room beside these.
        programs = concurrent + concurrent // 2 if few else 3 * concurrent
        prepare(
            min(tasks, max(programs, 1)),
            (q, k, a, b, A_log, dt_bias, tiles, vectors, flags),
            index_pointers(indices, CHUNK_ARRAYS),
            (indices.num_prefills, num_tokens, num_chunks),
            # A second launch that starts late finds the chunks prepared last in the L2 cache.
            {**strides, **gate_strides, **shape, "BACKWARDS": not few},
            num_warps=4,
            maxnreg=168,
        )
    elif num_chunks:
        _prepare(
            tasks,
            (q, k, a, b, A_log, dt_bias, tiles, vectors),
            index_pointers(indices, CHUNK_ARRAYS),
            (indices.num_prefills, num_tokens),
            {"BETA_SCALE": beta_scale, **strides, **gate_strides, **shape},
            num_warps=4,
            maxnreg=128,
        )
    constants = {
        **strides,
        "V_STRIDES": v_strides,
        "OUT_STRIDE": out.stride(0),
        **shape,
        "V": V,
        "BLOCK_V": block_V,
    }
    programs = tiles_of_row * (indices.num_prefills + 1)
    tensors = q, k, v, tiles, vectors, state, out
    if hopper:
        scan(
            programs,
            (*tensors, flags),
            rows,
            numbers,
            constants | {"CONCURRENT": 0 if few else concurrent},
            num_warps=block_V // 16,
            launch_pdl=flags is not None,
        )
    else:
        stages = (3 if K <= 128 else 2) if narrow else 1
        _scan(
            programs,
            tensors,
            rows,
            numbers,
            constants | {"CONCURRENT": concurrent, "STAGES": stages},
            num_warps=block_V // 16,
        )
