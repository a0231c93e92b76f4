"""Run Kimi Delta Attention (arXiv:2510.26692) over the prefill rows of a batch, in two launches.

A chunk of 64 tokens, the lines of q, k and v, takes the state S [V, K] of a head through

    u = inverse (v - k_in S^T);  o = q_in S^T + scores u;  S = S diag(decay) + u^T k_out

Here k_in and q_in are normalised k and q, every channel decayed from the chunk's start; k_out is normalised k, decayed
to its end. The first launch (`prepare`) computes all operands but v, for all chunks at once. The second carries the
states. Its products are transposed, so that each left operand is already in registers.

For bf16 activations both launches are in Gluon (`hopper_prepare`, `scan`, `persistent_scan`) and overlap. The Triton
kernels, here and in `prepare`, serve the other cases.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...device import processors
from ...indices import StateIndices
from ..common.chunks import CHUNK, ROW_ARRAYS, clear_padding, keep_busy, prefill_row, row_and_tile, tokens_of_chunk
from ..common.delta_rule import dot
from ..common.hopper import served
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, layer_strides, slot_elements, slot_stride
from ..common.prefetch import later_tile, prefetch
from ..common.state_tile import load_tile, state_tile, store_tile
from .persistent_scan import persistent_scan
from .prepare import padded_width, prepare
from .scan import scan

MIN_TURNS = 8  # per program, which claims two turns ahead: with fewer, some may get none


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
    V_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CONCURRENT: tl.constexpr,
):
    """Carry BLOCK_V lines of one head's state per program through all chunks of one sequence."""
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
    v_tile = wide_step * V_STRIDES[0] + row[None, :]
    operand_tile = wide_step * K + channel[None, :]
    tile = wide_step * CHUNK + step[None, :]
    place = step.to(tl.int64)[None, :] * OUT_STRIDE + row[:, None]
    triangle = step[None, :] // 8 <= step[:, None] // 8
    for chunk in tl.range(batch_row.first_chunk, batch_row.last_chunk, num_stages=1):
        chunk_start, count = tokens_of_chunk(batch_row, chunk)
        filled = step < count
        t = chunk_start.to(tl.int64)
        mask = filled[:, None] & in_K[None, :]
        lower = filled[:, None] & triangle
        mask_V = filled[:, None] & in_V[None, :]
        k_in = tl.load(operands + t * K + operand_tile, mask=mask, other=0)
        q_in = tl.load(operands + wide_tokens * (HEADS * K) + t * K + operand_tile, mask=mask, other=0)
        k_out = tl.load(operands + wide_tokens * (2 * HEADS * K) + t * K + operand_tile, mask=mask, other=0)
        values = tl.load(v + t * V_STRIDES[0] + v_tile, mask=mask_V, other=0)
        inverse = tl.load(tiles + t * CHUNK + tile, mask=lower, other=0)
        scores = tl.load(tiles + (wide_tokens * HEADS + t) * CHUNK + tile, mask=lower, other=0)
        decay = tl.load(totals + tl.cast(chunk, tl.int64) * (HEADS * K) + channel, mask=in_K, other=0)
        dst = tl.load(chunk_dst + chunk)

        read = S.to(OPERAND)
        known = -dot(read, tl.trans(k_in))
        u = dot(tl.trans(values.to(OPERAND)), tl.trans(inverse))
        u = dot(known.to(OPERAND), tl.trans(inverse), u)
        o = dot(read, tl.trans(q_in))
        u = u.to(OPERAND)
        o = dot(u, tl.trans(scores), o)
        S = dot(u, k_out, decay[None, :] * S)
        if STATE != tl.float32:
            S = S.to(STATE).to(tl.float32)
        tl.store(out + t * OUT_STRIDE + place, o.to(out.dtype.element_ty), mask=filled[None, :] & in_V[:, None])
        if dst != 0:
            store_tile(held, dst, S)


_scan = Launcher(_scan_kernel)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    indices: StateIndices,
    out: Tensor,
) -> None:
    """Fill prefill and padding tokens of `out` [F, H, V] and store states at `chunk_dst`."""
    num_tokens, heads, K = q.shape
    V = v.shape[2]
    concurrent = processors(q.get_device())  # a processor runs one program of 128 lines
    # Tiles of 64 lines if all run at once, else of 128 lines, which read operands half as often.
    few = heads * cdiv(V, 64) * indices.num_prefills <= concurrent
    block_V = 64 if V <= 64 or few else 128
    # A second launch of few programs needs room beside these.
    tiles, operands, totals, flags = prepare(
        q, k, g, b, A_log, dt_bias, indices, concurrent + concurrent // 2 if few else 3 * concurrent
    )
    (v_strides,) = layer_strides(v)
    hopper = K <= 128 and served((v,), (v_strides,))
    tiles_of_row = heads * cdiv(V, block_V)
    tensors = v, tiles, operands, totals, state, out
    rows = index_pointers(indices, ROW_ARRAYS)
    numbers = indices.num_prefills, slot_stride(state), num_tokens
    constants = {
        "V_STRIDES": v_strides,
        "OUT_STRIDE": out.stride(0),
        "HEADS": heads,
        "K": K,
        "V": V,
        "BLOCK_K": padded_width(K, tiles.dtype),
        "BLOCK_V": block_V,
    }
    programs = max(concurrent, 1)
    many = tiles_of_row * indices.num_prefills >= MIN_TURNS * programs
    if hopper and flags is not None and many and keep_busy(indices, tiles_of_row, programs):
        persistent_scan(
            programs,
            (*tensors, flags),
            rows,
            numbers,
            constants,
            num_warps=block_V // 16,
            launch_pdl=True,
        )
    elif hopper:
        scan(
            tiles_of_row * (indices.num_prefills + 1),
            (*tensors, flags),
            rows,
            numbers,
            constants | {"CONCURRENT": concurrent, "STAGES": 2 if few and flags is not None else 3},
            num_warps=block_V // 16,
            launch_pdl=flags is not None,
        )
    else:
        _scan(
            tiles_of_row * (indices.num_prefills + 1),
            tensors,
            rows,
            numbers,
            constants | {"CONCURRENT": concurrent},
            num_warps=block_V // 16,
        )
