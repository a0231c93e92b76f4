"""Run prefill (arXiv:2405.21060) in two Triton launches.

A chunk has 64 tokens, the lines of x, B and C. It takes the state S [P, N] of a head through

    y = decay * (C S^T) + scores x;  S = decay S + (to_end * x)^T B

Scores are C B^T times the decay between both tokens and the earlier token's step size, plus D on the diagonal. The
first launch computes scores and vectors of all chunks. The second carries states. Its products are transposed: every
scaled operand is a left operand, in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.chunks import CHUNK, SECTOR, chunk_tokens, clear_padding, prefill_row, row_and_tile, tokens_of_chunk
from ..common.decays import LOG2_E, log2_sums, pairwise_decays, softplus
from ..common.delta_rule import dot, operand
from ..common.launch import Launcher
from ..common.layout import slot_elements
from ..common.prefetch import later_tile, prefetch
from ..common.state_tile import load_tile, state_tile, store_tile

HEADS_PER_PROGRAM = 8  # of the first launch
ROWS = tl.constexpr(64)  # most state lines per program of the second launch
# With more chunks, prefetching a later program's state costs more than it hides.
PREFETCH_CHUNKS = tl.constexpr(8)


@triton.jit
def _halves(x):
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def _products(x, y):
    """Return x y^T [64, 64]; wide fp32 operands fit into shared memory only in halves."""
    if x.dtype == tl.float32 and x.shape[1] > 128:
        x_left, x_right = _halves(x)
        y_left, y_right = _halves(y)
        return dot(x_right, tl.trans(y_right), dot(x_left, tl.trans(y_left)))
    else:
        return dot(x, tl.trans(y))


@triton.jit
def _line(x, i):
    return tl.sum(tl.where(tl.arange(0, x.shape[0])[:, None] == i, x, 0.0), axis=0)


@triton.jit(do_not_specialize=["num_prefills", "dt_stride", "dt_head_stride", "dt_min", "dt_max", "num_tokens"])
def _prepare_kernel(
    B,
    C,
    dt,
    A,
    dt_bias,
    D,
    score_tiles,
    vectors,
    query_start_loc,
    chunk_start,
    seq_chunk_start,
    num_prefills,
    dt_stride,
    dt_head_stride,
    dt_min,
    dt_max,
    num_tokens,
    B_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Serve BLOCK_H heads of a group."""
    OPERAND: tl.constexpr = score_tiles.dtype.element_ty
    PRECISE: tl.constexpr = OPERAND == tl.float32
    OF_GROUP: tl.constexpr = HEADS // GROUPS
    PARTS: tl.constexpr = (OF_GROUP + BLOCK_H - 1) // BLOCK_H
    chunk, part = row_and_tile(GROUPS * PARTS)
    start, count = chunk_tokens(chunk, query_start_loc, chunk_start, seq_chunk_start, num_prefills, GROUPS * PARTS)
    group, first = part // PARTS, part % PARTS * BLOCK_H
    step = tl.arange(0, CHUNK)
    filled = step < count
    t = start.to(tl.int64)
    row, column = step[:, None], step[None, :]

    channel = tl.arange(0, BLOCK_N)
    mask = filled[:, None] & (channel < N)[None, :]
    B += t * B_STRIDES[0] + group * B_STRIDES[1]
    C += t * C_STRIDES[0] + group * C_STRIDES[1]
    inputs = tl.load(B + row * B_STRIDES[0] + channel[None, :], mask=mask, other=0).to(OPERAND)
    reads = tl.load(C + row * C_STRIDES[0] + channel[None, :], mask=mask, other=0).to(OPERAND)
    products = _products(reads, inputs)
    stored = filled[:, None] & (column // SECTOR <= row // SECTOR)  # the second launch loads no more

    # In one dimension, so that a thread has one token of all heads.
    each = tl.arange(0, BLOCK_H * CHUNK)
    each_step, each_head = each % CHUNK, group * OF_GROUP + first + each // CHUNK
    present = (each_step < count) & (first + each // CHUNK < OF_GROUP)
    size = tl.load(dt + (t + each_step) * dt_stride + each_head * dt_head_stride, mask=present, other=0).to(tl.float32)
    if dt_bias is not None:
        size += tl.load(dt_bias + each_head, mask=present, other=0).to(tl.float32)
    size = tl.where(present, tl.minimum(tl.maximum(softplus(size), dt_min), dt_max), 0.0)
    log_decay = size * tl.load(A + each_head, mask=present, other=0).to(tl.float32) * LOG2_E
    log_decay = tl.reshape(log_decay, [BLOCK_H, CHUNK])
    sums, fine = log2_sums(log_decay, PRECISE)
    last = column == CHUNK - 1
    to_end = tl.sum(tl.where(last, sums, 0.0), axis=1)[:, None] - sums
    to_end += tl.sum(tl.where(last, fine, 0.0), axis=1)[:, None] - fine
    vector = vectors + 2 * each_head.to(tl.int64) * num_tokens + t + each_step
    tl.store(vector, tl.reshape(tl.exp2(tl.cumsum(log_decay, 1)), [BLOCK_H * CHUNK]), mask=present)
    tl.store(vector + num_tokens, tl.reshape(tl.exp2(to_end), [BLOCK_H * CHUNK]) * size, mask=present)
    size = tl.reshape(size, [BLOCK_H, CHUNK])

    for i in tl.range(tl.minimum(OF_GROUP - first, BLOCK_H), num_stages=2):
        head = group * OF_GROUP + first + i
        pairwise = pairwise_decays(_line(sums, i), _line(fine, i), PRECISE)
        scores = products * pairwise * _line(size, i)[None, :]
        if D is not None:
            scores += tl.where(row == column, tl.load(D + head).to(tl.float32), 0.0)
        tile = score_tiles + (head.to(tl.int64) * num_tokens + t) * CHUNK + row * CHUNK + column
        tl.store(tile, operand(scores, OPERAND), mask=stored)


@triton.jit(do_not_specialize=["num_prefills", "slot_stride", "num_tokens"])
def _scan_kernel(
    x,
    B,
    C,
    z,
    score_tiles,
    vectors,
    state,
    out,
    query_start_loc,
    rows,
    chunk_dst,
    num_prefills,
    slot_stride,
    num_tokens,
    X_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
    Z_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
    CONCURRENT: tl.constexpr,
    HOPPER: tl.constexpr,
):
    """Carry BLOCK_P lines of a head's state through a row's chunks."""
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    OPERAND: tl.constexpr = score_tiles.dtype.element_ty
    STATE: tl.constexpr = state.dtype.element_ty
    sequence, index = row_and_tile(HEADS * TILES)
    head = index // TILES
    first_line = index % TILES * BLOCK_P
    line = tl.arange(0, BLOCK_P)
    step = tl.arange(0, CHUNK)
    in_P = first_line + line < P
    out += head * P + first_line

    if sequence == num_prefills:
        clear_padding(out, query_start_loc, num_prefills, num_tokens, line, in_P, OUT_STRIDE)
        return

    row = prefill_row(rows, sequence)
    slot_stride = slot_elements(slot_stride, state)
    later_state = later_tile(
        state, rows, num_prefills, slot_stride, sequence, index, HEADS * TILES, BLOCK_P * N, CONCURRENT
    )

    held = state_tile(state, slot_stride, head, first_line, P, N, BLOCK_P, BLOCK_N)
    S = load_tile(held, row.slot)

    if TILES * BLOCK_P == P and BLOCK_N == N and row.last_chunk - row.first_chunk <= PREFETCH_CHUNKS:
        prefetch(later_state, BLOCK_P * N)

    channel = tl.arange(0, BLOCK_N)
    x += head * X_STRIDES[1] + first_line
    B += head // (HEADS // GROUPS) * B_STRIDES[1]
    C += head // (HEADS // GROUPS) * C_STRIDES[1]
    score_tiles += head.to(tl.int64) * num_tokens * CHUNK
    vectors += 2 * head.to(tl.int64) * num_tokens
    each_step = tl.arange(0, 2 * CHUNK) % CHUNK
    each = tl.arange(0, 2 * CHUNK) // CHUNK * num_tokens + each_step
    # 32-bit offsets, added to a scalar pointer: 64 bits take twice the registers.
    x_tile = step[None, :] * X_STRIDES[0] + line[:, None]
    B_tile = step[:, None] * B_STRIDES[0] + channel[None, :]
    C_tile = step[:, None] * C_STRIDES[0] + channel[None, :]
    tile = step[:, None] * CHUNK + step[None, :]
    place = step[None, :] * OUT_STRIDE + line[:, None]
    triangle = step[None, :] // 8 <= step[:, None] // 8
    for chunk in tl.range(row.first_chunk, row.last_chunk, num_stages=STAGES):
        chunk_start, count = tokens_of_chunk(row, chunk)
        filled = step < count
        t = chunk_start.to(tl.int64)
        mask_N = filled[:, None]
        if BLOCK_N != N:
            mask_N &= (channel < N)[None, :]
        mask_P = filled[None, :]
        if TILES * BLOCK_P != P:
            mask_P &= in_P[:, None]
        inputs = tl.load(B + t * B_STRIDES[0] + B_tile, mask=mask_N, other=0).to(OPERAND)
        reads = tl.load(C + t * C_STRIDES[0] + C_tile, mask=mask_N, other=0).to(OPERAND)
        values = tl.load(x + t * X_STRIDES[0] + x_tile, mask=mask_P, other=0)
        scores = tl.load(score_tiles + t * CHUNK + tile, mask=filled[:, None] & triangle, other=0)
        two = tl.load(vectors + t + each, mask=each_step < count, other=0)
        total_decay = tl.load(vectors + t + count - 1)
        dst = tl.load(chunk_dst + chunk)

        decay, to_end = tl.split(tl.permute(tl.reshape(two, [2, CHUNK]), (1, 0)))
        y = decay[None, :] * dot(operand(S, OPERAND), tl.trans(reads))
        S = dot(operand(to_end[None, :] * values.to(tl.float32), OPERAND), inputs, total_decay * S)
        # The compiler looks at the last product: if it has no more columns than lines, each warp has its own lines.
        y = dot(values.to(OPERAND), tl.trans(scores), y)
        if STATE != tl.float32:
            S = S.to(STATE).to(tl.float32)
        mask = filled[None, :] & in_P[:, None]
        if z is not None:
            gate = z + t * Z_STRIDES[0] + head * Z_STRIDES[1] + first_line
            gate = tl.load(gate + step[None, :] * Z_STRIDES[0] + line[:, None], mask=mask, other=0).to(tl.float32)
            y *= gate / (1 + tl.exp(-gate))
        tl.store(out + t * OUT_STRIDE + place, y.to(out.dtype.element_ty), mask=mask)
        if HOPPER:
            # A mask, not a branch: the compiler does not wait for a product that only a branch reads.
            store_tile(held, dst, S, MAY_BE_NULL=True)
        elif dst != 0:
            store_tile(held, dst, S)


prepare = Launcher(_prepare_kernel)
scan = Launcher(_scan_kernel)
