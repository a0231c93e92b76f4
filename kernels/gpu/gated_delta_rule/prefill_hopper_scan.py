"""Run the second launch of prefill in Gluon, with the same bits as `prefill_triton`.

Products are transposed, with left operands in registers. Shared memory holds three chunks, two of them being copied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.chunks import CHUNK
from ..common.hopper import (
    Outputs,
    clear_padding,
    copy_async,
    copy_tile,
    later_tile,
    prefetch_states,
    prefill_row,
    slot_elements,
    store_outputs,
    tokens_of_chunk,
    wait_for_flags,
)
from ..common.launch import Launcher
from ..common.structs import aggregate


@aggregate
class Sources:
    """Hold a head's tensors in global memory, and their strides of tokens."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    inverse: gl.tensor
    scores: gl.tensor
    vectors: gl.tensor
    rows_left: gl.tensor
    num_tokens: gl.tensor
    Q_STRIDE: gl.constexpr
    K_STRIDE: gl.constexpr
    V_STRIDE: gl.constexpr
    TILE_STRIDE: gl.constexpr
    K: gl.constexpr


@aggregate
class Copies:
    """Hold STAGES chunks of the sources in shared memory."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    inverse: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    vectors: gl.shared_memory_descriptor


@gluon.jit
def _copy_first(copies, stage, sources, t, count):
    """Begin to copy the operands of a chunk's first products to a stage."""
    t = t.to(gl.int64)
    copy_tile(copies.k.index(stage), sources.k + t * sources.K_STRIDE, sources.K_STRIDE, count, sources.K)
    copy_tile(copies.v.index(stage), sources.v + t * sources.V_STRIDE, sources.V_STRIDE, count, sources.rows_left)
    STRIDE: gl.constexpr = sources.TILE_STRIDE
    copy_tile(copies.inverse.index(stage), sources.inverse + t * STRIDE, STRIDE, count, CHUNK, LOWER=True)
    async_copy.commit_group()


@gluon.jit
def _copy_last(copies, stage, sources, t, count):
    t = t.to(gl.int64)
    each = gl.arange(0, 4 * CHUNK, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    step = each % CHUNK
    copy_async(
        copies.vectors.index(stage),
        sources.vectors + t + (each // CHUNK * sources.num_tokens + step),
        mask=step < count,
    )
    copy_tile(copies.q.index(stage), sources.q + t * sources.Q_STRIDE, sources.Q_STRIDE, count, sources.K)
    STRIDE: gl.constexpr = sources.TILE_STRIDE
    copy_tile(copies.scores.index(stage), sources.scores + t * STRIDE, STRIDE, count, CHUNK, LOWER=True)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["num_prefills", "slot_stride", "num_tokens"])
def _delta_scan_kernel(
    q,
    k,
    v,
    tiles,
    vectors,
    state,
    out,
    flags,
    query_start_loc,
    rows,
    chunk_dst,
    num_prefills,
    slot_stride,
    num_tokens,
    Q_STRIDES: gl.constexpr,
    K_STRIDES: gl.constexpr,
    V_STRIDES: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
    VALUE_HEADS: gl.constexpr,
    K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    CONCURRENT: gl.constexpr,
):
    """Carry BLOCK_V lines of a value head's state through a sequence."""
    TILES: gl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    STAGES: gl.constexpr = 3
    WARPS: gl.constexpr = BLOCK_V // 16
    BF16: gl.constexpr = gl.bfloat16
    STATE: gl.constexpr = state.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    CARRIED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_K, 16])
    OF_STEP: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    LEFT_CARRIED: gl.constexpr = gl.DotOperandLayout(0, CARRIED, 2)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_V, BLOCK_V // 8], [WARPS, 1], [1, 0])
    program = gl.program_id(0)
    sequence, index = program // (VALUE_HEADS * TILES), program % (VALUE_HEADS * TILES)
    head = index // TILES
    first_row = index % TILES * BLOCK_V
    out += head * V + first_row

    if sequence == num_prefills:
        end = gl.load(query_start_loc + num_prefills)
        clear_padding(Outputs(out, V - first_row, OUT_STRIDE, OUT), end, num_tokens, BLOCK_V)
        return

    batch_row = prefill_row(rows, sequence)
    end, origin = batch_row.end, batch_row.origin
    first_chunk, last_chunk, slot = batch_row.first_chunk, batch_row.last_chunk, batch_row.slot
    slot_stride = slot_elements(slot_stride, state)
    later_state = later_tile(
        state, rows, num_prefills, slot_stride, sequence, index, VALUE_HEADS * TILES, BLOCK_V * K, CONCURRENT
    )
    state_row = first_row + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, CARRIED))[:, None]
    channel = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, CARRIED))[None, :]
    inside = (state_row < V) & (channel < K)
    element = state_row * K + channel
    state += head * V * K
    S = gl.load(state + slot * slot_stride + element, mask=inside & (slot != 0), other=0).to(gl.float32)
    if CONCURRENT > 0 and V % BLOCK_V == 0:
        prefetch_states(later_state, BLOCK_V * K)

    by_key: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_K], BF16)
    by_value: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_V], BF16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], BF16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_tiles = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_K], by_key)
    v_tiles = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_V], by_value)
    inverses = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, CHUNK], square)
    q_tiles = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_K], by_key)
    score_tiles = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, CHUNK], square)
    fours = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], flat)
    q += head // (VALUE_HEADS // HEADS) * Q_STRIDES[1]
    k += head // (VALUE_HEADS // HEADS) * K_STRIDES[1]
    v += head * V_STRIDES[1] + first_row
    tiles += head * CHUNK
    vectors += head.to(gl.int64) * (4 * num_tokens)
    TILE_STRIDE: gl.constexpr = VALUE_HEADS * CHUNK
    copies = Copies(q_tiles, k_tiles, v_tiles, inverses, score_tiles, fours)
    scores = tiles + gl.cast(num_tokens, gl.int64) * TILE_STRIDE
    rows_left = V - first_row
    sources = Sources(
        q, k, v, tiles, scores, vectors, rows_left, num_tokens, Q_STRIDES[0], K_STRIDES[0], V_STRIDES[0], TILE_STRIDE, K
    )
    outputs = Outputs(out, rows_left, OUT_STRIDE, OUT)

    ready = first_chunk
    for i in gl.static_range(STAGES - 1):
        if flags is not None:
            ready = wait_for_flags(flags + head, VALUE_HEADS, first_chunk + i, last_chunk, ready)
        t, count = tokens_of_chunk(batch_row, first_chunk + i)
        _copy_first(copies, i, sources, t, count)
        _copy_last(copies, i, sources, t, count)
    there = first_chunk < last_chunk
    dst = gl.load(chunk_dst + first_chunk, mask=there, other=0)
    decay = gl.load(vectors + gl.minimum(origin + CHUNK, end) - 1, mask=there, other=0)
    zeros = gl.zeros([BLOCK_V, CHUNK], gl.float32, layout=PRODUCT)
    last_o, last_t, last_count = zeros.to(BF16), batch_row.start, 0
    for chunk in range(first_chunk, last_chunk):
        boundary = origin + (chunk - first_chunk) * CHUNK
        t, count = tokens_of_chunk(batch_row, chunk)
        stage = (chunk - first_chunk) % STAGES
        free = (chunk - first_chunk + STAGES - 1) % STAGES
        ahead = gl.maximum(boundary + (STAGES - 1) * CHUNK, batch_row.start)
        ahead_count = gl.minimum(boundary + STAGES * CHUNK, end) - ahead
        async_copy.wait_group(2)
        fence_async_shared()
        keys, inverse = k_tiles.index(stage), inverses.index(stage).permute((1, 0))
        read = gl.convert_layout(S.to(BF16), LEFT)
        known = warpgroup_mma(read, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
        u = warpgroup_mma(v_tiles.index(stage).permute((1, 0)), inverse, zeros, use_acc=False, is_async=True)

        store_outputs(outputs, v_tiles.index(free), last_o, last_t, last_count)

        there = chunk + 1 < last_chunk
        next_dst = gl.load(chunk_dst + chunk + 1, mask=there, other=0)
        next_decay = gl.load(vectors + gl.minimum(boundary + 2 * CHUNK, end) - 1, mask=there, other=0)
        four = fours.index(stage)
        key_decay = four.slice(CHUNK, CHUNK).load(OF_STEP)[None, :]
        known = warpgroup_mma_wait(1, deps=[known])
        known = gl.convert_layout((-key_decay * known).to(BF16), LEFT)
        u = warpgroup_mma(known, inverse, u, is_async=True)
        o = warpgroup_mma(read, q_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        S = decay * S
        to_end = four.slice(3 * CHUNK, CHUNK).load(OF_STEP)[None, :]
        u = warpgroup_mma_wait(1, deps=[u])
        S = warpgroup_mma(gl.convert_layout((to_end * u).to(BF16), LEFT_CARRIED), keys, S, is_async=True)
        u = gl.convert_layout(u.to(BF16), LEFT)
        query_decay = four.slice(2 * CHUNK, CHUNK).load(OF_STEP)[None, :]
        o = query_decay * warpgroup_mma_wait(1, deps=[o])
        o = warpgroup_mma(u, score_tiles.index(stage).permute((1, 0)), o, is_async=True)

        if flags is not None:
            ready = wait_for_flags(flags + head, VALUE_HEADS, chunk + STAGES - 1, last_chunk, ready)
        _copy_first(copies, free, sources, ahead, ahead_count)
        _copy_last(copies, free, sources, ahead, ahead_count)
        S, o = warpgroup_mma_wait(0, deps=[S, o])
        last_o = o.to(BF16)
        if STATE != gl.float32:
            S = S.to(STATE).to(gl.float32)
        if dst != 0:
            gl.store(state + dst * slot_stride + element, S.to(STATE), mask=inside)
        dst, decay, last_t, last_count = next_dst, next_decay, t, count
    async_copy.wait_group(0)
    last_values = v_tiles.index((last_chunk - first_chunk + STAGES - 1) % STAGES)
    store_outputs(outputs, last_values, last_o, last_t, last_count)


scan = Launcher(_delta_scan_kernel)
