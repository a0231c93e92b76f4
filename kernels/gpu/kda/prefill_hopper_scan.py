"""Run the second launch in Gluon, for bf16 activations, with the same bits as `prefill_triton`.

Shared memory holds STAGES chunks of the first products' operands and two of the others. Two stages leave room for a
program of the first launch on the same processor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common.chunks import CHUNK
from ..common.hopper import (
    Outputs,
    barrier,
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

LAST_STAGES = gl.constexpr(2)


@aggregate
class Sources:
    """Point to a head's values and to its results of the first launch."""

    v: gl.tensor
    k_in: gl.tensor
    q_in: gl.tensor
    k_out: gl.tensor
    inverse: gl.tensor
    scores: gl.tensor
    totals: gl.tensor
    lines: gl.tensor
    HEADS: gl.constexpr
    K: gl.constexpr
    V_STRIDE: gl.constexpr


@aggregate
class Stages:
    """Hold operands in shared memory, with the stage as first dim."""

    k_in: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    inverse: gl.shared_memory_descriptor
    q_in: gl.shared_memory_descriptor
    k_out: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    decay: gl.shared_memory_descriptor


@gluon.jit
def _copy_first(stages, stage, sources, t, count):
    """Begin to copy operands of a chunk's first products."""
    t = t.to(gl.int64)
    copy_tile(stages.k_in.index(stage), sources.k_in + t * sources.K, sources.K, count, sources.K)
    copy_tile(stages.v.index(stage), sources.v + t * sources.V_STRIDE, sources.V_STRIDE, count, sources.lines)
    copy_tile(stages.inverse.index(stage), sources.inverse + t * CHUNK, CHUNK, count, CHUNK, LOWER=True)
    async_copy.commit_group()


@gluon.jit
def _copy_last(stages, stage, sources, chunk, t, count):
    """Begin to copy the other operands; `chunk` counts chunks of the batch."""
    t = t.to(gl.int64)
    copy_tile(stages.q_in.index(stage), sources.q_in + t * sources.K, sources.K, count, sources.K)
    copy_tile(stages.k_out.index(stage), sources.k_out + t * sources.K, sources.K, count, sources.K)
    copy_tile(stages.scores.index(stage), sources.scores + t * CHUNK, CHUNK, count, CHUNK, LOWER=True)
    decay = stages.decay.index(stage)
    channel = gl.arange(0, decay.shape[0], layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    totals = sources.totals + chunk.to(gl.int64) * (sources.HEADS * sources.K)
    copy_async(decay, totals + channel, mask=(channel < sources.K) & (count > 0))
    async_copy.commit_group()


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
    HEADS: gl.constexpr,
    K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    V_STRIDES: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    CONCURRENT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Carry BLOCK_V lines of one head's state per program through one row's chunks."""
    TILES: gl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    WARPS: gl.constexpr = BLOCK_V // 16
    BF16: gl.constexpr = gl.bfloat16
    STATE: gl.constexpr = state.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    CARRIED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_K, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
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

    row = prefill_row(rows, sequence)
    first_chunk, last_chunk = row.first_chunk, row.last_chunk
    stride = slot_elements(slot_stride, state)
    later_state = later_tile(state, rows, num_prefills, stride, sequence, index, HEADS * TILES, V * K, CONCURRENT)
    state_row = first_row + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, CARRIED))[:, None]
    channel = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, CARRIED))[None, :]
    inside = (state_row < V) & (channel < K)
    element = state_row * K + channel
    state += head * V * K
    S = gl.load(state + row.slot * stride + element, mask=inside & (row.slot != 0), other=0).to(gl.float32)
    if BLOCK_V == V and BLOCK_K == K:
        prefetch_states(later_state, V * K)

    by_key: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_K], BF16)
    by_value: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_V], BF16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], BF16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    stages = Stages(
        gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_K], by_key),
        gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_V], by_value),
        gl.allocate_shared_memory(BF16, [STAGES, CHUNK, CHUNK], square),
        gl.allocate_shared_memory(BF16, [LAST_STAGES, CHUNK, BLOCK_K], by_key),
        gl.allocate_shared_memory(BF16, [LAST_STAGES, CHUNK, BLOCK_K], by_key),
        gl.allocate_shared_memory(BF16, [LAST_STAGES, CHUNK, CHUNK], square),
        gl.allocate_shared_memory(gl.float32, [LAST_STAGES, BLOCK_K], flat),
    )
    v += head * V_STRIDES[1] + first_row
    wide_tokens = gl.cast(num_tokens, gl.int64)
    tiles += head * wide_tokens * CHUNK
    operands += head * wide_tokens * K
    size = wide_tokens * (HEADS * K)
    scores = tiles + wide_tokens * (HEADS * CHUNK)
    totals += head * K
    lines = V - first_row
    sources = Sources(
        v, operands, operands + size, operands + 2 * size, tiles, scores, totals, lines, HEADS, K, V_STRIDES[0]
    )
    outputs = Outputs(out, lines, OUT_STRIDE, OUT)

    ready = first_chunk
    for i in gl.static_range(STAGES - 1):
        ready = wait_for_flags(flags + head, HEADS, first_chunk + i, last_chunk, ready)
        ahead, count = tokens_of_chunk(row, first_chunk + i)
        _copy_first(stages, i, sources, ahead, count)
        if i == 0:
            _copy_last(stages, 0, sources, first_chunk, ahead, count)
    dst = gl.load(chunk_dst + first_chunk, mask=first_chunk < last_chunk, other=0)
    zeros = gl.zeros([BLOCK_V, CHUNK], gl.float32, layout=PRODUCT)
    last_o, last_t, last_count = zeros.to(BF16), row.start, 0
    for chunk in range(first_chunk, last_chunk):
        boundary = row.origin + (chunk - first_chunk) * CHUNK
        t, count = tokens_of_chunk(row, chunk)
        stage = (chunk - first_chunk) % STAGES
        last_stage = (chunk - first_chunk) % LAST_STAGES
        free = (chunk - first_chunk + STAGES - 1) % STAGES
        last_free = (chunk - first_chunk + 1) % LAST_STAGES
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        read = gl.convert_layout(S.to(BF16), LEFT)
        known = warpgroup_mma(read, stages.k_in.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        inverse = stages.inverse.index(stage).permute((1, 0))
        u = warpgroup_mma(stages.v.index(stage).permute((1, 0)), inverse, zeros, use_acc=False, is_async=True)

        next_dst = gl.load(chunk_dst + chunk + 1, mask=chunk + 1 < last_chunk, other=0)
        after = boundary + CHUNK
        after_count = gl.minimum(after + CHUNK, row.end) - after
        # With two stages, the next chunk's copies must begin early.
        if STAGES == 2:
            ready = wait_for_flags(flags + head, HEADS, chunk + 1, last_chunk, ready)
        _copy_last(stages, last_free, sources, chunk + 1, after, after_count)
        store_outputs(outputs, stages.v.index(free), last_o, last_t, last_count)
        if STAGES == 2:
            barrier()
            _copy_first(stages, free, sources, after, after_count)

        known = warpgroup_mma_wait(1, deps=[known])
        known = gl.convert_layout((-known).to(BF16), LEFT)
        u = warpgroup_mma(known, inverse, u, is_async=True)
        q_in = stages.q_in.index(last_stage).permute((1, 0))
        o = warpgroup_mma(read, q_in, zeros, use_acc=False, is_async=True)
        S = stages.decay.index(last_stage).load(gl.SliceLayout(0, CARRIED))[None, :] * S
        u = warpgroup_mma_wait(1, deps=[u])
        u = u.to(BF16)
        written = gl.convert_layout(u, gl.DotOperandLayout(0, CARRIED, 2))
        S = warpgroup_mma(written, stages.k_out.index(last_stage), S, is_async=True)
        u = gl.convert_layout(u, LEFT)
        o = warpgroup_mma(u, stages.scores.index(last_stage).permute((1, 0)), o, is_async=True)

        if STAGES > 2:
            ready = wait_for_flags(flags + head, HEADS, chunk + STAGES - 1, last_chunk, ready)
            ahead = boundary + (STAGES - 1) * CHUNK
            left = gl.minimum(ahead + CHUNK, row.end) - ahead
            _copy_first(stages, free, sources, ahead, left)
        S, o = warpgroup_mma_wait(0, deps=[S, o])
        last_o = o.to(BF16)
        if STATE != gl.float32:
            S = S.to(STATE).to(gl.float32)
        if dst != 0:
            gl.store(state + dst * stride + element, S.to(STATE), mask=inside)
        dst, last_t, last_count = next_dst, t, count
    async_copy.wait_group(0)
    last = stages.v.index((last_chunk - first_chunk + STAGES - 1) % STAGES)
    store_outputs(outputs, last, last_o, last_t, last_count)


scan = Launcher(_kda_scan_kernel)
