"""Run the first launch of prefill for bf16 activations in Gluon: see `prepare`.

A part has up to 64 channels. The operands of pairs replace the inputs in shared memory.

Pairs meet in the chunk's middle: log decays are sums from there, negated before it. One factor per channel takes
operands to the chunk's start or end. Parts that decay too far for this take `add_far`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..common.chunks import CHUNK
from ..common.decays import LOG2_E
from ..common.delta_rule import BLOCK, NORM_EPS
from ..common.hopper import (
    Chunks,
    barrier,
    clear_flags,
    copy_tile,
    ends_of_prefills,
    narrow,
    reinterpret,
    set_flag,
    starts_of_task,
    tokens_between,
    tokens_of_task,
    wide,
)
from ..common.inverse import WARPS, columns, diagonal, rejoined, unit_lower_inverse
from ..common.launch import Launcher
from .hopper_decays import far_sums, halvings, log_decays, near_sums, store_far, store_operands
from .hopper_pairs import MAX_FACTORED_DECAY, add_far, add_near, joined_blocks, rest


@gluon.jit
def _copy_inputs(inputs_s, sources, t, count, head, STRIDES: gl.constexpr, K: gl.constexpr):
    PARTS: gl.constexpr = inputs_s[0].shape[0]
    PART: gl.constexpr = inputs_s[0].shape[2]
    for part in gl.static_range(PARTS):
        for i in gl.static_range(3):
            place = sources[i] + t * STRIDES[i][0] + head * STRIDES[i][1] + part * PART
            copy_tile(inputs_s[i].index(part), place, STRIDES[i][0], count, K - part * PART)
    async_copy.commit_group()


@gluon.jit
def _gates(b, A_log, dt_bias, t, count, head, STRIDES: gl.constexpr, K: gl.constexpr, PART: gl.constexpr):
    """Load inputs of decays and betas, except g. Channels from K on must not decay."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    step = gl.arange(0, CHUNK, layout=FLAT)
    beta = gl.load(b + head * STRIDES[1] + (t + step) * STRIDES[0], mask=step < count, other=0)
    channel = gl.arange(0, PART, layout=FLAT)
    dt_bias += head * K + channel
    first = gl.load(dt_bias, mask=channel < K, other=float("-inf"))
    second = gl.load(dt_bias + PART, mask=channel + PART < K, other=float("-inf"))
    return beta, first, second, gl.load(A_log + head)


@gluon.jit
def _diagonals(blocks):
    LAYOUT: gl.constexpr = blocks.type.layout
    i = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    j = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return gl.reshape(gl.sum(gl.where(i == j, blocks, 0.0), axis=2), [CHUNK])


@gluon.jit
def _norms_and_own_scores(q_s, k_s, SCALE: gl.constexpr):
    """Return SCALE / |q|, 1 / |k| and their product with q k, which no decay rounds, for every token."""
    BATCH: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, BLOCK, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, BATCH, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, BATCH, 2)
    PARTS: gl.constexpr = q_s.shape[0]
    qq = gl.zeros([4, BLOCK, BLOCK], gl.float32, layout=BATCH)
    kk, qk = qq, qq
    for part in gl.static_range(PARTS):
        q_rows = q_s.index(part).reshape([4, BLOCK, q_s.shape[2]])
        k_rows = k_s.index(part).reshape([4, BLOCK, k_s.shape[2]])
        queries, keys = q_rows.load(LEFT), k_rows.permute((0, 2, 1)).load(RIGHT)
        qq = mma_v2(queries, q_rows.permute((0, 2, 1)).load(RIGHT), qq)
        kk = mma_v2(k_rows.load(LEFT), keys, kk)
        qk = mma_v2(queries, keys, qk)
    q_norm = gl.rsqrt(_diagonals(qq) + NORM_EPS) * SCALE
    k_norm = gl.rsqrt(_diagonals(kk) + NORM_EPS)
    return q_norm, k_norm, _diagonals(qk) * (q_norm * k_norm)


@gluon.jit
def _store_total(total, halves, channels):
    channel = gl.arange(0, halves[0].shape[0], layout=halves[0].type.layout)
    gl.store(total + channel, gl.exp2(halves[0] + halves[1]), mask=channel < channels)


@gluon.jit
def _normalised(x_s, norms_s, LAYOUT: gl.constexpr):
    return wide(x_s.load(LAYOUT)) * norms_s.load(gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _store_near(operand, size, total, parts_s, norms_s, sums, halves, part, count, K: gl.constexpr):
    """Store a part's operands of the second launch, and of pairs in place of the inputs."""
    LAYOUT: gl.constexpr = sums.type.layout
    queries = _normalised(parts_s[0], norms_s[0], LAYOUT)
    keys = _normalised(parts_s[1], norms_s[1], LAYOUT)
    channels = K - part * sums.shape[1]
    operand += part * sums.shape[1]
    outputs = operand, operand + size, operand + 2 * size
    store_operands(outputs, parts_s, queries, keys, sums, halves, count, channels, K)
    _store_total(total + part * sums.shape[1], halves, channels)


@gluon.jit
def _store_far(operand, size, total, parts_s, norms_s, sums, halves, part, count, K: gl.constexpr):
    LAYOUT: gl.constexpr = sums.type.layout
    queries = _normalised(parts_s[0], norms_s[0], LAYOUT)
    keys = _normalised(parts_s[1], norms_s[1], LAYOUT)
    channels = K - part * sums.shape[1]
    operand += part * sums.shape[1]
    outputs = operand, operand + size, operand + 2 * size
    store_far(outputs, queries, keys, sums, halves, count, channels, K)
    _store_total(total + part * sums.shape[1], halves, channels)


@gluon.jit(do_not_specialize=["num_prefills", "num_tokens", "num_chunks"])
def _kda_prepare_kernel(
    q,
    k,
    g,
    b,
    A_log,
    dt_bias,
    tiles,
    operands,
    totals,
    flags,
    query_start_loc,
    chunk_start,
    seq_chunk_start,
    num_prefills,
    num_tokens,
    num_chunks,
    STRIDES: gl.constexpr,
    B_STRIDES: gl.constexpr,
    HEADS: gl.constexpr,
    K: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    BF16: gl.constexpr = gl.bfloat16
    PART: gl.constexpr = min(BLOCK_K, 64)  # channels
    PARTS: gl.constexpr = BLOCK_K // PART
    WIDTH: gl.constexpr = max(PART // 16, 2)
    LANES: gl.constexpr = PART // WIDTH
    RUN: gl.constexpr = CHUNK * LANES // (32 * WARPS)
    RUNS: gl.constexpr = CHUNK // RUN
    VEC: gl.constexpr = gl.BlockedLayout([RUN, WIDTH], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    CHANNELS: gl.constexpr = gl.SliceLayout(0, VEC)
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    BATCH: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, BLOCK, 8])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, WIDE)
    LIMIT: gl.constexpr = MAX_FACTORED_DECAY * LOG2_E
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    by_key: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, PART], BF16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], BF16)
    of_blocks: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK], BF16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    q_s = gl.allocate_shared_memory(BF16, [PARTS, CHUNK, PART], by_key)
    k_s = gl.allocate_shared_memory(BF16, [PARTS, CHUNK, PART], by_key)
    g_s = gl.allocate_shared_memory(BF16, [PARTS, CHUNK, PART], by_key)
    tile_s = gl.allocate_shared_memory(BF16, [CHUNK, CHUNK], square)
    left_s = tile_s if PART == CHUNK else gl.allocate_shared_memory(BF16, [CHUNK, PART], by_key)
    # Separate allocations show the compiler that stores and loads do not overlap.
    C0_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks)
    C1_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks)
    C2_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks)
    D_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks)
    # Sums of decays use this memory before the inverse does.
    runs_s = reinterpret(C0_s, gl.float32, [RUNS, PART], plain)
    starts_s = reinterpret(C1_s, gl.float32, [RUNS, PART], plain)
    vectors_s = reinterpret(C2_s, gl.float32, [8, PART], flat)
    first_s, second_s = vectors_s.index(0), vectors_s.index(1)
    middle_of_first_s, middle_of_second_s = vectors_s.index(2), vectors_s.index(3)
    first_bias_s, second_bias_s = vectors_s.index(4), vectors_s.index(5)
    q_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    k_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    betas_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    own_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    inputs_s, halves_s = (q_s, k_s, g_s), (first_s, second_s)
    quarters_s, norms_s = (middle_of_first_s, middle_of_second_s), (q_norms_s, k_norms_s)
    sources = q, k, g
    chunks = Chunks(query_start_loc, chunk_start, seq_chunk_start, num_prefills, num_chunks)
    size = gl.cast(num_tokens, gl.int64) * (HEADS * K)
    num_tasks = num_chunks * HEADS
    gl.store(flags, 0, mask=gl.program_id(0) == 0)  # where `persistent_scan` counts turns
    flags += 1
    clear_flags(flags, num_tasks)
    task = gl.program_id(0)
    t, count, head, _ = tokens_of_task(task, chunks, HEADS, False)
    _copy_inputs(inputs_s, sources, t, count, head, STRIDES, K)
    beta, first_bias, second_bias, rate = _gates(b, A_log, dt_bias, t, count, head, B_STRIDES, K, PART)
    ends = ends_of_prefills(chunks)
    far_parts = 0
    while task < num_tasks:
        # Guess that a task is far if the previous was; a wrong guess changes no result.
        far_parts = gl.where(far_parts != 0, (1 << PARTS) - 1, 0)
        next_task = task + gl.num_programs(0)
        starts = starts_of_task(next_task, chunks, HEADS, False)
        rate = -gl.exp(rate.to(gl.float32))
        first_bias_s.store(first_bias.to(gl.float32) * LOG2_E)
        if PARTS == 2:
            second_bias_s.store(second_bias.to(gl.float32) * LOG2_E)
        betas_s.store(1 / (1 + gl.exp(-beta.to(gl.float32))))
        async_copy.wait_group(0)
        barrier()
        q_norm, k_norm, own_scores = _norms_and_own_scores(q_s, k_s, K**-0.5)
        q_norms_s.store(q_norm)
        k_norms_s.store(k_norm)
        own_s.store(own_scores)
        place = head.to(gl.int64) * num_tokens + t
        operand = operands + place * K
        total = totals + task.to(gl.int64) * K
        if far_parts == 0:
            for part in range(PARTS):
                decays = log_decays(g_s.index(part), vectors_s.index(4 + part).load(CHANNELS), rate, count, VEC)
                sums, halves = near_sums(decays, runs_s)
                if gl.min(gl.minimum(halves[0], halves[1]), axis=0) < -LIMIT:
                    far_parts += 1 << part
                else:
                    parts_s = q_s.index(part), k_s.index(part), g_s.index(part)
                    _store_near(operand, size, total, parts_s, norms_s, sums, halves, part, count, K)
        scores = gl.zeros([CHUNK, CHUNK], gl.float32, layout=WIDE)
        products = scores
        if far_parts != 0:
            zeros = gl.zeros([CHUNK, BLOCK], gl.float32, layout=NARROW)
            none = gl.zeros([4, BLOCK, BLOCK], gl.float32, layout=BATCH)
            score_blocks = zeros, zeros, zeros, none
            product_blocks = zeros, zeros, zeros, none
            left_parts = far_parts
            for part in range(PARTS):
                if left_parts >> part & 1 != 0:
                    parts_s = q_s.index(part), k_s.index(part), g_s.index(part)
                    decays = log_decays(parts_s[2], vectors_s.index(4 + part).load(CHANNELS), rate, count, VEC)
                    sums = far_sums(decays, runs_s, starts_s, halves_s, quarters_s)
                    halves = first_s.load(CHANNELS), second_s.load(CHANNELS)
                    if gl.min(gl.minimum(halves[0], halves[1]), axis=0) < -LIMIT:
                        further = halvings(decays, halves_s, quarters_s, LIMIT)
                        _store_far(operand, size, total, parts_s, norms_s, sums, halves, part, count, K)
                        score_blocks, product_blocks = add_far(
                            score_blocks, product_blocks, sums, further, parts_s, norms_s, quarters_s, left_s
                        )
                        # Zeros add nothing below.
                        barrier()
                        parts_s[2].store(gl.zeros([CHUNK, PART], BF16, layout=VEC))
                    else:
                        far_parts -= 1 << part
                        sums, halves = near_sums(decays, runs_s)
                        _store_near(operand, size, total, parts_s, norms_s, sums, halves, part, count, K)
            of_column = rest(k_norms_s.load(OF_COLUMN))[None, :]
            scores = joined_blocks(score_blocks, WIDE) * rest(q_norms_s.load(OF_ROW))[:, None] * of_column
            products = joined_blocks(product_blocks, WIDE) * rest(k_norms_s.load(OF_ROW))[:, None] * of_column
        fence_async_shared()
        barrier()
        scores, products = add_near(scores, products, q_s, k_s, g_s)
        row = gl.arange(0, CHUNK, layout=OF_ROW)[:, None]
        column = gl.arange(0, CHUNK, layout=OF_COLUMN)[None, :]
        tile_s.store(narrow(gl.where(column <= row, scores, 0.0)))
        barrier()
        next_t, next_count, next_head, _ = tokens_between(next_task, starts, ends, num_chunks, HEADS)
        # No product reads operands any more: copy the next task's inputs.
        _copy_inputs(inputs_s, sources, next_t, next_count, next_head, STRIDES, K)
        beta, first_bias, second_bias, rate = _gates(
            b, A_log, dt_bias, next_t, next_count, next_head, B_STRIDES, K, PART
        )
        products *= betas_s.load(OF_COLUMN)[None, :]

        tile = tiles + place * CHUNK
        row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, OUT))[:, None]
        column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, OUT))[None, :]
        stored = (row < count) & (column // 8 <= row // 8)  # as the second launch masks
        score_tile = tile + gl.cast(num_tokens, gl.int64) * (HEADS * CHUNK)
        gl.store(score_tile + (row * CHUNK + column), tile_s.load(OUT), mask=stored)

        row_of_block = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, NARROW))[:, None]
        block, i = row_of_block // BLOCK, row_of_block % BLOCK
        j = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, NARROW))[None, :]
        blocks = columns(products, NARROW)
        inner = gl.where(j < i, diagonal(blocks, block), 0.0)
        inverse = unit_lower_inverse(blocks, inner, (C0_s, C1_s, C2_s, D_s), block, i, j, True)
        inverse = rejoined(inverse)
        inverse = gl.convert_layout(inverse, WIDE) * betas_s.load(OF_ROW)[:, None]
        tile_s.store(inverse.to(BF16))
        barrier()
        gl.store(tile + (row * CHUNK + column), tile_s.load(OUT), mask=stored)
        # Overwrites entries that other threads stored before several barriers.
        step = gl.arange(0, CHUNK, layout=FLAT)
        gl.store(score_tile + step * (CHUNK + 1), own_s.load(FLAT).to(BF16), mask=step < count)
        set_flag(flags + task)
        task, t, count, head = next_task, next_t, next_count, next_head
    async_copy.wait_group(0)


prepare = Launcher(_kda_prepare_kernel)
