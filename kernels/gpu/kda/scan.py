"""Run the second launch of prefill for bf16 activations in Gluon, with the same bits as `prefill._scan_kernel`.

Shared memory holds STAGES chunks of the first products' operands and two of the other operands. Two stages leave room
for a program of the first launch on the same processor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.chunks import CHUNK, ROW_FIELDS, SRC_FIELD
from ..common.hopper import (
    Outputs,
    barrier,
    clear_padding,
    copy_async,
    copy_tile,
    prefetch_states,
    store_outputs,
    wait_for_flags,
)
from ..common.launch import Launcher
from ..common.layout import SLOT_UNIT

LAST_STAGES = gl.constexpr(2)


@gluon.jit
def copy_first(
    copies,
    stage,
    sources,
    place,
    t,
    count,
    rows_left,
    V_STRIDE: gl.constexpr,
    K: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Begin to copy the operands of a chunk's first products to a stage; `place` counts tokens in scratch."""
    k_tiles, v_tiles, inverses = copies
    k_in, v, inverse = sources
    copy_tile(k_tiles.index(stage), k_in + place * K, K, count, K)
    copy_tile(v_tiles.index(stage), v + t * V_STRIDE, V_STRIDE, count, rows_left)
    copy_tile(inverses.index(stage), inverse + place * CHUNK, CHUNK, count, CHUNK, LOWER=True)
    async_copy.commit_group()


@gluon.jit
def copy_last(copies, stage, sources, place, count, chunk, HEADS: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    q_tiles, k_tiles, scores_tiles, decays = copies
    q_in, k_out, scores, totals = sources
    copy_tile(q_tiles.index(stage), q_in + place * K, K, count, K)
    copy_tile(k_tiles.index(stage), k_out + place * K, K, count, K)
    copy_tile(scores_tiles.index(stage), scores + place * CHUNK, CHUNK, count, CHUNK, LOWER=True)
    decay = decays.index(stage)
    channel = gl.arange(0, decay.shape[0], layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    copy_async(decay, totals + chunk.to(gl.int64) * (HEADS * K) + channel, mask=(channel < K) & (count > 0))
    async_copy.commit_group()


@gluon.jit
def shared_tiles(STAGES: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_V: gl.constexpr):
    BF16: gl.constexpr = gl.bfloat16
    by_key: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_K], BF16)
    by_value: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_V], BF16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], BF16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_in = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_K], by_key)
    v = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_V], by_value)
    inverses = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, CHUNK], square)
    q_in = gl.allocate_shared_memory(BF16, [LAST_STAGES, CHUNK, BLOCK_K], by_key)
    k_out = gl.allocate_shared_memory(BF16, [LAST_STAGES, CHUNK, BLOCK_K], by_key)
    scores = gl.allocate_shared_memory(BF16, [LAST_STAGES, CHUNK, CHUNK], square)
    decays = gl.allocate_shared_memory(gl.float32, [LAST_STAGES, BLOCK_K], flat)
    return (k_in, v, inverses), (q_in, k_out, scores, decays)


@gluon.jit
def first_products(S, copies, stage, zeros):
    """Begin S k_in^T and v^T inverse^T of a chunk. Return S as an operand, and both products."""
    k_in, v, inverses = copies
    LEFT: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
    read = gl.convert_layout(S.to(gl.bfloat16), LEFT)
    known = warpgroup_mma(read, k_in.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    inverse = inverses.index(stage).permute((1, 0))
    u = warpgroup_mma(v.index(stage).permute((1, 0)), inverse, zeros, use_acc=False, is_async=True)
    return read, known, u


@gluon.jit
def last_products(S, products, inverse, copies, stage, zeros):
    """Begin a chunk's other products, given the result of `first_products`. Return S and o, still in flight."""
    read, known, u = products
    q_in, k_out, scores, decays = copies
    LEFT: gl.constexpr = gl.DotOperandLayout(0, zeros.type.layout, 2)
    CARRIED: gl.constexpr = S.type.layout
    known = warpgroup_mma_wait(1, deps=[known])
    known = gl.convert_layout((-known).to(gl.bfloat16), LEFT)
    u = warpgroup_mma(known, inverse.permute((1, 0)), u, is_async=True)
    o = warpgroup_mma(read, q_in.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    S = decays.index(stage).load(gl.SliceLayout(0, CARRIED))[None, :] * S
    u = warpgroup_mma_wait(1, deps=[u])
    u = u.to(gl.bfloat16)
    S = warpgroup_mma(gl.convert_layout(u, gl.DotOperandLayout(0, CARRIED, 2)), k_out.index(stage), S, is_async=True)
    return S, warpgroup_mma(gl.convert_layout(u, LEFT), scores.index(stage).permute((1, 0)), o, is_async=True)


@gluon.jit(do_not_specialize=["num_prefills", "slot_stride", "num_tokens"])
def _kda_scan_kernel(
    v,
    tiles,
    operands,
    totals,
    state,
    out,
    flags,
    query_start_loc,
    rows,
    chunk_dst,
    num_prefills,
    slot_stride,
    num_tokens,
    V_STRIDES: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_V: gl.constexpr,
    CONCURRENT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Carry BLOCK_V lines of one head's state per program through all chunks of one sequence."""
    TILES: gl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    WARPS: gl.constexpr = BLOCK_V // 16
    BF16: gl.constexpr = gl.bfloat16
    STATE: gl.constexpr = state.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    CARRIED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_K, 16])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_V, BLOCK_V // 8], [WARPS, 1], [1, 0])
    program = gl.program_id(0)
    sequence, index = program // (HEADS * TILES), program % (HEADS * TILES)
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
    later_row = gl.minimum(sequence + later // (HEADS * TILES), num_prefills - 1)
    later_slot = gl.load(rows + later_row * ROW_FIELDS + SRC_FIELD)
    later_state = state + later_slot * slot_stride + later % (HEADS * TILES) * (V * K)
    state_row = first_row + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, CARRIED))[:, None]
    channel = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, CARRIED))[None, :]
    inside = (state_row < V) & (channel < K)
    element = state_row * K + channel
    state += head * V * K
    S = gl.load(state + slot * slot_stride + element, mask=inside & (slot != 0), other=0).to(gl.float32)
    if BLOCK_V == V and BLOCK_K == K:
        prefetch_states(later_state, V * K)

    first_copies, last_copies = shared_tiles(STAGES, BLOCK_K, BLOCK_V)
    _, v_tiles, inverses = first_copies
    v += head * V_STRIDES[1] + first_row
    wide_tokens = gl.cast(num_tokens, gl.int64)
    tiles += head * wide_tokens * CHUNK
    operands += head * wide_tokens * K
    size = wide_tokens * (HEADS * K)
    first_sources = operands, v, tiles
    last_sources = operands + size, operands + 2 * size, tiles + wide_tokens * (HEADS * CHUNK), totals + head * K
    rows_left = V - first_row
    outputs = Outputs(out, rows_left, OUT_STRIDE, OUT)

    ready = first_chunk
    for i in gl.static_range(STAGES - 1):
        if flags is not None:
            ready = wait_for_flags(flags + 1 + head, HEADS, first_chunk + i, last_chunk, ready)
        ahead = gl.maximum(origin + i * CHUNK, start)
        count = gl.minimum(origin + (i + 1) * CHUNK, end) - ahead
        ahead = ahead.to(gl.int64)
        copy_first(first_copies, i, first_sources, ahead, ahead, count, rows_left, V_STRIDES[0], K, WARPS)
        if i == 0:
            copy_last(last_copies, 0, last_sources, ahead, count, first_chunk, HEADS, K, WARPS)
    dst = gl.load(chunk_dst + first_chunk, mask=first_chunk < last_chunk, other=0)
    zeros = gl.zeros([BLOCK_V, CHUNK], gl.float32, layout=PRODUCT)
    last_o, last_t, last_count = zeros.to(BF16), start, 0
    for chunk in range(first_chunk, last_chunk):
        boundary = origin + (chunk - first_chunk) * CHUNK
        t = gl.maximum(boundary, start)
        count = gl.minimum(boundary + CHUNK, end) - t
        stage = (chunk - first_chunk) % STAGES
        last_stage = (chunk - first_chunk) % LAST_STAGES
        free = (chunk - first_chunk + STAGES - 1) % STAGES
        last_free = (chunk - first_chunk + 1) % LAST_STAGES
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        products = first_products(S, first_copies, stage, zeros)

        next_dst = gl.load(chunk_dst + chunk + 1, mask=chunk + 1 < last_chunk, other=0)
        after = boundary + CHUNK
        after_count = gl.minimum(after + CHUNK, end) - after
        after = after.to(gl.int64)
        # With two stages, the next chunk's copies must begin early.
        if STAGES == 2 and flags is not None:
            ready = wait_for_flags(flags + 1 + head, HEADS, chunk + 1, last_chunk, ready)
        copy_last(last_copies, last_free, last_sources, after, after_count, chunk + 1, HEADS, K, WARPS)
        store_outputs(outputs, v_tiles.index(free), last_o, last_t, last_count)
        if STAGES == 2:
            barrier()
            copy_first(first_copies, free, first_sources, after, after, after_count, rows_left, V_STRIDES[0], K, WARPS)

        S, o = last_products(S, products, inverses.index(stage), last_copies, last_stage, zeros)
        if STAGES > 2:
            if flags is not None:
                ready = wait_for_flags(flags + 1 + head, HEADS, chunk + STAGES - 1, last_chunk, ready)
            ahead = boundary + (STAGES - 1) * CHUNK
            left = gl.minimum(ahead + CHUNK, end) - ahead
            ahead = ahead.to(gl.int64)
            copy_first(first_copies, free, first_sources, ahead, ahead, left, rows_left, V_STRIDES[0], K, WARPS)
        S, o = warpgroup_mma_wait(0, deps=[S, o])
        last_o = o.to(BF16)
        if STATE != gl.float32:
            S = S.to(STATE).to(gl.float32)
        if dst != 0:
            gl.store(state + dst * slot_stride + element, S.to(STATE), mask=inside)
        dst, last_t, last_count = next_dst, t, count
    async_copy.wait_group(0)
    last = v_tiles.index((last_chunk - first_chunk + STAGES - 1) % STAGES)
    store_outputs(outputs, last, last_o, last_t, last_count)


scan = Launcher(_kda_scan_kernel)
