"""Run prefill in one Gluon launch, with the same bits as in two.

A program carries tiles of states through their sequences, one after the other. Four warps copy chunks, compute decays
and store outputs. Four prepare operands, and eight carry states. Roles run ahead as far as shared memory has room.

Barriers of a program's chunk n:

| barrier | arrives | waits | meaning |
|---|---|---|---|
| copied | copy | prepare | queries and keys are loaded |
| values | copy | carry | values are loaded |
| decayed | copy | prepare | decays and betas are ready |
| prepared | prepare | carry | scores, inverse and vectors are ready |
| done | carry | copy, at n + 2 | outputs are in shared memory, and stages are free |
| stored | copy, at n + 2 | carry, at n + 1 | outputs are in global memory |
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.chunks import CHUNK
from ..common.delta_rule import BLOCK
from ..common.hopper import (
    Outputs,
    barrier,
    by_fours,
    clear_padding,
    copy_tile,
    prefetch_states,
    prefill_row,
    reinterpret,
    slot_elements,
    tokens_of_chunk,
)
from ..common.inverse import WARPS
from ..common.launch import Launcher
from ..common.structs import aggregate
from .prefill_hopper_prepare import FLAT, Inputs, Scratch, decays, gates, places, store_inverse, store_scores

BLOCK_V = gl.constexpr(128)
CARRYING = gl.constexpr(8)  # warps
REGISTERS = gl.constexpr((128, 48))  # per thread that prepares, and that copies
COPIES = gl.constexpr(3)  # stages of queries and keys
STAGES = gl.constexpr(2)  # stages of everything else
PART = gl.constexpr(8)  # lines per copy: a single copy would keep an offset for every line


@gluon.jit
def _copy_chunk(tile, place, STRIDE: gl.constexpr, count, columns):
    for first in gl.static_range(0, CHUNK, PART):
        copy_tile(tile.slice(first, PART), place + first * STRIDE, STRIDE, count - first, columns)


@gluon.jit
def _store_outputs(out, tile, count, rows, OUT_STRIDE: gl.constexpr):
    """Store a chunk's outputs [64, 128] from shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    step = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    o = tile.load(LAYOUT).to(out.dtype.element_ty)
    gl.store(out + (step * OUT_STRIDE + row), o, mask=(step < count) & (row < rows))


@aggregate
class Work:
    """Hold `num_items` tiles of states to carry."""

    state: gl.tensor
    slot_stride: gl.tensor
    rows: gl.tensor
    num_items: gl.tensor
    VALUE_HEADS: gl.constexpr
    K: gl.constexpr
    V: gl.constexpr


@aggregate
class Stages:
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    inverses: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    vectors: gl.shared_memory_descriptor
    totals: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor
    outputs: gl.shared_memory_descriptor


@aggregate
class Barriers:
    copied: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    decayed: gl.shared_memory_descriptor
    prepared: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    stored: gl.shared_memory_descriptor


@gluon.jit
def _item(work, item):
    """Return an item's batch row, value head and first line."""
    TILES: gl.constexpr = (work.V + BLOCK_V - 1) // BLOCK_V
    ITEMS: gl.constexpr = work.VALUE_HEADS * TILES
    batch_row = prefill_row(work.rows, item // ITEMS)
    return batch_row, item % ITEMS // TILES, item % TILES * BLOCK_V


@gluon.jit
def _copy(inputs, v, out, work, stages, barriers, V_STRIDES: gl.constexpr, OUT_STRIDE: gl.constexpr):
    K: gl.constexpr = work.K
    V: gl.constexpr = work.V
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    flat_vectors = reinterpret(stages.vectors, gl.float32, [STAGES * 4 * CHUNK, 1], flat)
    n = 0
    # Offsets start as constants, or Triton 3.6 takes a variable that the outer loop passes on for unchanged.
    older_place, older_count, older_rows = gl.cast(0, gl.int64), 0, V
    last_place, last_count, last_rows = gl.cast(0, gl.int64), 0, V
    for item in range(gl.program_id(0), work.num_items, gl.num_programs(0)):
        batch_row, head, first_row = _item(work, item)
        if V % BLOCK_V == 0:
            state = work.state + (batch_row.slot * work.slot_stride + (head * V + first_row) * K)
            prefetch_states(state, BLOCK_V * K)
        for chunk in range(batch_row.first_chunk, batch_row.last_chunk):
            first, count = tokens_of_chunk(batch_row, chunk)
            t = first.to(gl.int64)
            # The wait for room for the previous chunk's values also freed this stage of q and k.
            q_place, k_place = places(inputs, t, head)
            _copy_chunk(stages.q.index(n % COPIES), q_place, inputs.Q_STRIDES[0], count, K)
            _copy_chunk(stages.k.index(n % COPIES), k_place, inputs.K_STRIDES[0], count, K)
            async_copy.mbarrier_arrive(barriers.copied.index(n % COPIES), increment_count=False)
            raw = gates(inputs, first, count, head)

            stage = n % STAGES
            mbarrier.wait(barriers.done.index(stage), (n // STAGES & 1) ^ 1)
            v_place = v + t * V_STRIDES[0] + (head * V_STRIDES[1] + first_row)
            _copy_chunk(stages.v.index(stage), v_place, V_STRIDES[0], count, V - first_row)
            async_copy.mbarrier_arrive(barriers.values.index(stage), increment_count=False)
            _store_outputs(out + older_place, stages.outputs, older_count, older_rows, OUT_STRIDE)
            barrier()
            mbarrier.arrive(barriers.stored, count=1)

            four = stages.vectors.index(stage)
            decay, _ = decays(raw, count, four.slice(3 * CHUNK, CHUNK), four.slice(CHUNK, CHUNK))
            four.slice(0, CHUNK).store(decay)
            barrier()
            # Not the sum of all: zeros would change its order.
            stages.totals.index(stage).store(flat_vectors.index(stage * (4 * CHUNK) + count - 1).load(ONE))
            barrier()
            mbarrier.arrive(barriers.decayed.index(stage), count=1)
            older_place, older_count, older_rows = last_place, last_count, last_rows
            last_place = t * OUT_STRIDE + (head * V + first_row)
            last_count, last_rows = count, V - first_row
            n += 1
    async_copy.wait_group(0)
    mbarrier.wait(barriers.done.index(n % STAGES), (n // STAGES & 1) ^ 1)
    _store_outputs(out + older_place, stages.outputs, older_count, older_rows, OUT_STRIDE)
    barrier()
    mbarrier.arrive(barriers.stored, count=1)
    n += 1
    mbarrier.wait(barriers.done.index(n % STAGES), (n // STAGES & 1) ^ 1)
    _store_outputs(out + last_place, stages.outputs, last_count, last_rows, OUT_STRIDE)


@gluon.jit
def _prepare(work, stages, barriers, blocks_s, q_norms_s, k_norms_s):
    n = 0
    for item in range(gl.program_id(0), work.num_items, gl.num_programs(0)):
        batch_row, _, _ = _item(work, item)
        for _ in range(batch_row.first_chunk, batch_row.last_chunk):
            stage = n % STAGES
            four = stages.vectors.index(stage)
            betas_s, sums_s = four.slice(CHUNK, CHUNK), four.slice(3 * CHUNK, CHUNK)
            scratch = Scratch(sums_s, betas_s, q_norms_s, k_norms_s, blocks_s)
            mbarrier.wait(barriers.copied.index(n % COPIES), n // COPIES & 1)
            mbarrier.wait(barriers.decayed.index(stage), n // STAGES & 1)
            fence_async_shared()
            barrier()
            q_s, k_s = stages.q.index(n % COPIES), stages.k.index(n % COPIES)
            found = store_scores(stages.scores.index(stage), q_s, k_s, scratch, work.K)
            barrier()
            store_inverse(stages.inverses.index(stage), found, scratch)
            decay = four.slice(0, CHUNK).load(FLAT)
            to_end = gl.exp2(sums_s.slice(CHUNK - 1, 1).load(FLAT) - sums_s.load(FLAT))
            barrier()
            four.slice(CHUNK, CHUNK).store(decay * k_norms_s.load(FLAT))
            four.slice(2 * CHUNK, CHUNK).store(decay * q_norms_s.load(FLAT))
            four.slice(3 * CHUNK, CHUNK).store(to_end)
            fence_async_shared()
            barrier()
            mbarrier.arrive(barriers.prepared.index(stage), count=1)
            n += 1


@gluon.jit
def _carry(work, chunk_dst, stages, barriers):
    K: gl.constexpr = work.K
    V: gl.constexpr = work.V
    BF16: gl.constexpr = gl.bfloat16
    STATE: gl.constexpr = work.state.dtype.element_ty
    BLOCK_K: gl.constexpr = stages.read.shape[1]
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [CARRYING, 1], [16, CHUNK, 16])
    CARRIED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [CARRYING, 1], [16, BLOCK_K, 16])
    OF_STEP: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    LEFT_CARRIED: gl.constexpr = gl.DotOperandLayout(0, CARRIED, 2)
    FOURS: gl.constexpr = by_fours(BLOCK_V, BLOCK_K, CARRYING)
    row = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, FOURS))[:, None]
    channel = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, FOURS))[None, :]
    zeros = gl.zeros([BLOCK_V, CHUNK], gl.float32, layout=PRODUCT)
    n = 0
    for item in range(gl.program_id(0), work.num_items, gl.num_programs(0)):
        batch_row, head, first_row = _item(work, item)
        slot = batch_row.slot
        source = work.state + (slot * work.slot_stride + (head * V + first_row) * K)
        inside = (row < V - first_row) & (channel < K)
        S = gl.load(source + row * K + channel, mask=inside & (slot != 0), other=0)
        S = gl.convert_layout(S, CARRIED).to(gl.float32)
        for chunk in range(batch_row.first_chunk, batch_row.last_chunk):
            dst = gl.load(chunk_dst + chunk)
            stage = n % STAGES
            stages.read.store(S.to(BF16))
            mbarrier.wait(barriers.values.index(stage), n // STAGES & 1)
            mbarrier.wait(barriers.prepared.index(stage), n // STAGES & 1)
            fence_async_shared()
            barrier()
            queries, keys = stages.q.index(n % COPIES), stages.k.index(n % COPIES)
            inverse = stages.inverses.index(stage).permute((1, 0))
            four = stages.vectors.index(stage)
            known = warpgroup_mma(stages.read, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
            u = warpgroup_mma(stages.v.index(stage).permute((1, 0)), inverse, zeros, use_acc=False, is_async=True)
            key_decay = four.slice(CHUNK, CHUNK).load(OF_STEP)[None, :]
            known = warpgroup_mma_wait(1, deps=[known])
            known = gl.convert_layout((-key_decay * known).to(BF16), LEFT)
            u = warpgroup_mma(known, inverse, u, is_async=True)
            S = stages.totals.index(stage).load(gl.SliceLayout(0, CARRIED))[None, :] * S
            to_end = four.slice(3 * CHUNK, CHUNK).load(OF_STEP)[None, :]
            u = warpgroup_mma_wait(0, deps=[u])
            S = warpgroup_mma(gl.convert_layout((to_end * u).to(BF16), LEFT_CARRIED), keys, S, is_async=True)
            u = gl.convert_layout(u.to(BF16), LEFT)
            # Late, so that registers do not hold o beside both forms of u.
            o = warpgroup_mma(stages.read, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
            query_decay = four.slice(2 * CHUNK, CHUNK).load(OF_STEP)[None, :]
            o = query_decay * warpgroup_mma_wait(0, deps=[o])
            o = warpgroup_mma(u, stages.scores.index(stage).permute((1, 0)), o, is_async=True)
            S, o = warpgroup_mma_wait(0, deps=[S, o])
            mbarrier.wait(barriers.stored, (n + 1) & 1)
            stages.outputs.permute((1, 0)).store(o.to(BF16))
            barrier()
            mbarrier.arrive(barriers.done.index(stage), count=1)
            n += 1
            if STATE != gl.float32:
                S = S.to(STATE).to(gl.float32)
            if dst != 0:
                target = work.state + (dst * work.slot_stride + (head * V + first_row) * K)
                gl.store(target + row * K + channel, gl.convert_layout(S.to(STATE), FOURS), mask=inside)


@gluon.jit(do_not_specialize=["num_prefills", "slot_stride", "num_tokens"])
def _delta_prefill_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    state,
    out,
    query_start_loc,
    rows,
    chunk_dst,
    num_prefills,
    slot_stride,
    num_tokens,
    Q_STRIDES: gl.constexpr,
    K_STRIDES: gl.constexpr,
    V_STRIDES: gl.constexpr,
    A_STRIDES: gl.constexpr,
    B_STRIDES: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
    VALUE_HEADS: gl.constexpr,
    K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    V: gl.constexpr,
):
    TILES: gl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BF16: gl.constexpr = gl.bfloat16
    by_key: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_K], BF16)
    by_value: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_V], BF16)
    of_state: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_V, BLOCK_K], BF16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], BF16)
    of_blocks: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK], BF16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_tiles = gl.allocate_shared_memory(BF16, [COPIES, CHUNK, BLOCK_K], by_key)
    k_tiles = gl.allocate_shared_memory(BF16, [COPIES, CHUNK, BLOCK_K], by_key)
    v_tiles = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_V], by_value)
    inverses = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, CHUNK], square)
    score_tiles = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, CHUNK], square)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * CHUNK], flat)
    totals = gl.allocate_shared_memory(gl.float32, [STAGES, 1], flat)
    blocks_s = (
        gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks),
        gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks),
        gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks),
        gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks),
    )
    q_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    k_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    read_s = gl.allocate_shared_memory(BF16, [BLOCK_V, BLOCK_K], of_state)
    outputs_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK_V], by_value)
    copied = gl.allocate_shared_memory(gl.int64, [COPIES, 1], mbarrier.MBarrierLayout())
    values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decayed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    prepared = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(stored, count=1)
    for i in gl.static_range(COPIES):
        mbarrier.init(copied.index(i), count=32 * WARPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(values.index(i), count=32 * WARPS)
        mbarrier.init(decayed.index(i), count=1)
        mbarrier.init(prepared.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
    fence_async_shared()
    barrier()
    num_items = num_prefills * (VALUE_HEADS * TILES)
    slot_stride = slot_elements(slot_stride, state)
    inputs = Inputs(
        q, k, a, b, A_log, dt_bias, Q_STRIDES, K_STRIDES, A_STRIDES, B_STRIDES, VALUE_HEADS // HEADS
    )  # fmt: skip
    work = Work(state, slot_stride, rows, num_items, VALUE_HEADS, K, V)
    stages = Stages(q_tiles, k_tiles, v_tiles, inverses, score_tiles, vectors, totals, read_s, outputs_s)
    barriers = Barriers(copied, values, decayed, prepared, done, stored)
    gl.warp_specialize(
        [
            (_carry, (work, chunk_dst, stages, barriers)),
            (_prepare, (work, stages, barriers, blocks_s, q_norms_s, k_norms_s)),
            (_copy, (inputs, v, out, work, stages, barriers, V_STRIDES, OUT_STRIDE)),
        ],
        [WARPS, WARPS],
        REGISTERS,
    )
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [CARRYING, 1], [1, 0])
    end_of_tokens = gl.load(query_start_loc + num_prefills)
    for index in range(gl.program_id(0), VALUE_HEADS * TILES, gl.num_programs(0)):
        head, first_row = index // TILES, index % TILES * BLOCK_V
        outputs = Outputs(out + (head * V + first_row), V - first_row, OUT_STRIDE, OUT)
        clear_padding(outputs, end_of_tokens, num_tokens, BLOCK_V)


fused = Launcher(_delta_prefill_kernel)
