"""Run the second launch of prefill for bf16 activations in Gluon, with the same bits as `prefill._scan_kernel`.

Independent products are in flight together; scaling, copies and stores overlap with them. Shared memory holds three
chunks, two of them still being copied.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.chunks import CHUNK, ROW_FIELDS, SRC_FIELD
from ..common.hopper import (
    Outputs,
    clear_padding,
    copy_async,
    copy_tile,
    prefetch_states,
    store_outputs,
    wait_for_flags,
)
from ..common.launch import Launcher
from ..common.layout import SLOT_UNIT


@gluon.jit
def _copy_first(
    copies,
    stage,
    sources,
    t,
    count,
    rows_left,
    K_STRIDE: gl.constexpr,
    V_STRIDE: gl.constexpr,
    TILE_STRIDE: gl.constexpr,
    K: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Begin to copy the operands of a chunk's first products to a stage: `count` tokens from t on."""
    k_tiles, v_tiles, inverses = copies
    k, v, inverse = sources
    t = t.to(gl.int64)
    copy_tile(k_tiles.index(stage), k + t * K_STRIDE, K_STRIDE, count, K)
    copy_tile(v_tiles.index(stage), v + t * V_STRIDE, V_STRIDE, count, rows_left)
    copy_tile(inverses.index(stage), inverse + t * TILE_STRIDE, TILE_STRIDE, count, CHUNK, LOWER=True)
    async_copy.commit_group()


@gluon.jit
def _copy_last(
    copies,
    stage,
    sources,
    t,
    count,
    num_tokens,
    Q_STRIDE: gl.constexpr,
    TILE_STRIDE: gl.constexpr,
    K: gl.constexpr,
    WARPS: gl.constexpr,
):
    q_tiles, score_tiles, fours = copies
    q, scores, vectors = sources
    t = t.to(gl.int64)
    each = gl.arange(0, 4 * CHUNK, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    step = each % CHUNK
    copy_async(fours.index(stage), vectors + t + (each // CHUNK * num_tokens + step), mask=step < count)
    copy_tile(q_tiles.index(stage), q + t * Q_STRIDE, Q_STRIDE, count, K)
    copy_tile(score_tiles.index(stage), scores + t * TILE_STRIDE, TILE_STRIDE, count, CHUNK, LOWER=True)
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
    """Carry BLOCK_V lines of one value head's state per program through all chunks of one sequence.

    CONCURRENT programs run at a time; 0 means all.
    """
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

    fields = rows + sequence * ROW_FIELDS
    start, end, context = gl.load(fields), gl.load(fields + 1), gl.load(fields + 2)
    first_chunk, last_chunk, slot = gl.load(fields + 3), gl.load(fields + 4), gl.load(fields + SRC_FIELD)
    origin = start - context % CHUNK
    slot_stride = gl.cast(slot_stride, gl.int64) * (SLOT_UNIT * 8 // STATE.primitive_bitwidth)
    # Load the later program's slot before this program's state: see `later_tile`.
    later = index + CONCURRENT
    later_row = gl.minimum(sequence + later // (VALUE_HEADS * TILES), num_prefills - 1)
    later_slot = gl.load(rows + later_row * ROW_FIELDS + SRC_FIELD)
    later_state = state + later_slot * slot_stride + later % (VALUE_HEADS * TILES) * (BLOCK_V * K)
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
    first_copies, first_sources = (k_tiles, v_tiles, inverses), (k, v, tiles)
    last_copies = q_tiles, score_tiles, fours
    last_sources = q, tiles + gl.cast(num_tokens, gl.int64) * TILE_STRIDE, vectors
    rows_left = V - first_row
    outputs = Outputs(out, rows_left, OUT_STRIDE, OUT)

    ready = first_chunk
    for i in gl.static_range(STAGES - 1):
        if flags is not None:
            ready = wait_for_flags(flags + head, VALUE_HEADS, first_chunk + i, last_chunk, ready)
        t = gl.maximum(origin + i * CHUNK, start)
        count = gl.minimum(origin + (i + 1) * CHUNK, end) - t
        _copy_first(
            first_copies, i, first_sources, t, count, rows_left, K_STRIDES[0], V_STRIDES[0], TILE_STRIDE, K, WARPS
        )
        _copy_last(last_copies, i, last_sources, t, count, num_tokens, Q_STRIDES[0], TILE_STRIDE, K, WARPS)
    there = first_chunk < last_chunk
    dst = gl.load(chunk_dst + first_chunk, mask=there, other=0)
    decay = gl.load(vectors + gl.minimum(origin + CHUNK, end) - 1, mask=there, other=0)
    zeros = gl.zeros([BLOCK_V, CHUNK], gl.float32, layout=PRODUCT)
    last_o, last_t, last_count = zeros.to(BF16), start, 0
    for chunk in range(first_chunk, last_chunk):
        boundary = origin + (chunk - first_chunk) * CHUNK
        t = gl.maximum(boundary, start)
        count = gl.minimum(boundary + CHUNK, end) - t
        stage = (chunk - first_chunk) % STAGES
        free = (chunk - first_chunk + STAGES - 1) % STAGES
        ahead = gl.maximum(boundary + (STAGES - 1) * CHUNK, start)
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
        _copy_first(
            first_copies,
            free,
            first_sources,
            ahead,
            ahead_count,
            rows_left,
            K_STRIDES[0],
            V_STRIDES[0],
            TILE_STRIDE,
            K,
            WARPS,
        )
        _copy_last(last_copies, free, last_sources, ahead, ahead_count, num_tokens, Q_STRIDES[0], TILE_STRIDE, K, WARPS)
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
