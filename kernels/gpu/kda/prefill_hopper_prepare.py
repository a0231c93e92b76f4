"""Run the first launch in Gluon, for bf16 activations: see `prefill_triton`.

A part has up to 64 channels. Operands of pairs replace the inputs in shared memory.

Pairs meet in the chunk's middle: log decays are sums from there, negated before it. One factor per channel takes
operands to the chunk's start or end. Parts that decay too far for this take `add_far`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..common.chunks import CHUNK, SECTOR
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
)
from ..common.inverse import WARPS, columns, diagonal, rejoined, unit_lower_inverse
from ..common.launch import Launcher
from ..common.structs import aggregate
from .prefill_hopper_decays import (
    Operands,
    Part,
    Sums,
    far_sums,
    halvings,
    log_decays,
    near_sums,
    store_far,
    store_near,
)
from .prefill_hopper_pairs import MAX_FACTORED_DECAY, add_far, add_near, joined_blocks, rest


@aggregate
class Inputs:
    """Point to q, k and g (`activations`), and to the other inputs."""

    activations: gl.tuple
    b: gl.tensor
    A_log: gl.tensor
    dt_bias: gl.tensor
    STRIDES: gl.constexpr
    B_STRIDES: gl.constexpr
    K: gl.constexpr


@aggregate
class Tokens:
    """Hold a chunk's first token, token count and head."""

    t: gl.tensor
    count: gl.tensor
    head: gl.tensor


@gluon.jit
def _copy_inputs(inputs_s, inputs, tokens):
    """Begin to copy q, k and g of a chunk to `inputs_s`."""
    PARTS: gl.constexpr = inputs_s[0].shape[0]
    PART: gl.constexpr = inputs_s[0].shape[2]
    for part in gl.static_range(PARTS):
        for i in gl.static_range(3):
            start = inputs.activations[i] + tokens.t * inputs.STRIDES[i][0] + tokens.head * inputs.STRIDES[i][1]
            tile, channels = inputs_s[i].index(part), inputs.K - part * PART
            copy_tile(tile, start + part * PART, inputs.STRIDES[i][0], tokens.count, channels)
    async_copy.commit_group()


@gluon.jit
def _gates(inputs, tokens, PART: gl.constexpr):
    """Load inputs of decays and betas, except g. Channels from K on must not decay."""
    K: gl.constexpr = inputs.K
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    step = gl.arange(0, CHUNK, layout=FLAT)
    STRIDE: gl.constexpr = inputs.B_STRIDES[0]
    b, head = inputs.b, tokens.head
    beta = gl.load(b + head * inputs.B_STRIDES[1] + (tokens.t + step) * STRIDE, mask=step < tokens.count, other=0)
    channel = gl.arange(0, PART, layout=FLAT)
    dt_bias = inputs.dt_bias + (head * K + channel)
    first = gl.load(dt_bias, mask=channel < K, other=float("-inf"))
    second = gl.load(dt_bias + PART, mask=channel + PART < K, other=float("-inf"))
    return beta, first, second, gl.load(inputs.A_log + head)


@gluon.jit
def _diagonals(blocks):
    LAYOUT: gl.constexpr = blocks.type.layout
    i = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    j = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return gl.reshape(gl.sum(gl.where(i == j, blocks, 0.0), axis=2), [CHUNK])


@gluon.jit
def _norms_and_own_scores(q_s, k_s, SCALE: gl.constexpr):
    """Return SCALE / |q|, 1 / |k| and their product with q k, which no decay rounds [64]."""
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
    HEADS: gl.constexpr,
    K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STRIDES: gl.constexpr,
    B_STRIDES: gl.constexpr,
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
    # Separate, so the compiler sees that stores and loads do not overlap.
    C0_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks)
    C1_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks)
    C2_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks)
    D_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks)
    # Sums of decays use this memory before the inverse does.
    runs_s = reinterpret(C0_s, gl.float32, [RUNS, PART], plain)
    starts_s = reinterpret(C1_s, gl.float32, [RUNS, PART], plain)
    vectors_s = reinterpret(C2_s, gl.float32, [8, PART], flat)
    sums_s = Sums(runs_s, starts_s, vectors_s.index(0), vectors_s.index(1), vectors_s.index(2), vectors_s.index(3))
    first_bias_s, second_bias_s = vectors_s.index(4), vectors_s.index(5)
    q_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    k_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    betas_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    own_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    inputs_s, inputs = (q_s, k_s, g_s), Inputs((q, k, g), b, A_log, dt_bias, STRIDES, B_STRIDES, K)
    chunks = Chunks(query_start_loc, chunk_start, seq_chunk_start, num_prefills, num_chunks)
    size = gl.cast(num_tokens, gl.int64) * (HEADS * K)
    num_tasks = num_chunks * HEADS
    gl.store(flags, 0, mask=gl.program_id(0) == 0)  # where `persistent_scan` counts turns
    flags += 1
    clear_flags(flags, num_tasks)
    task = gl.program_id(0)
    t, count, head, _ = tokens_of_task(task, chunks, HEADS, False)
    tokens = Tokens(t, count, head)
    _copy_inputs(inputs_s, inputs, tokens)
    beta, first_bias, second_bias, rate = _gates(inputs, tokens, PART)
    ends = ends_of_prefills(chunks)
    far_parts = 0
    while task < num_tasks:
        # Guess that a far task follows another; a wrong guess changes no result.
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
        count = tokens.count
        place = tokens.head.to(gl.int64) * num_tokens + tokens.t
        operands_of_chunk = Operands(operands + place * K, size, totals + task.to(gl.int64) * K, count, K)
        if far_parts == 0:
            for part in range(PARTS):
                part_s = Part(q_s.index(part), k_s.index(part), g_s.index(part), q_norms_s, k_norms_s)
                decays = log_decays(part_s.g, vectors_s.index(4 + part).load(CHANNELS), rate, count, VEC)
                sums, halves = near_sums(decays, sums_s)
                if gl.min(gl.minimum(halves[0], halves[1]), axis=0) < -LIMIT:
                    far_parts += 1 << part
                else:
                    store_near(operands_of_chunk, part_s, sums, halves, part)
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
                    part_s = Part(q_s.index(part), k_s.index(part), g_s.index(part), q_norms_s, k_norms_s)
                    decays = log_decays(part_s.g, vectors_s.index(4 + part).load(CHANNELS), rate, count, VEC)
                    sums = far_sums(decays, sums_s)
                    halves = sums_s.first.load(CHANNELS), sums_s.second.load(CHANNELS)
                    if gl.min(gl.minimum(halves[0], halves[1]), axis=0) < -LIMIT:
                        further = halvings(decays, sums_s, LIMIT)
                        store_far(operands_of_chunk, part_s, sums, halves, part)
                        score_blocks, product_blocks = add_far(
                            score_blocks, product_blocks, sums, further, part_s, sums_s, left_s
                        )
                        # Zeros add nothing below.
                        barrier()
                        part_s.g.store(gl.zeros([CHUNK, PART], BF16, layout=VEC))
                    else:
                        far_parts -= 1 << part
                        sums, halves = near_sums(decays, sums_s)
                        store_near(operands_of_chunk, part_s, sums, halves, part)
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
        t, count, head, _ = tokens_between(next_task, starts, ends, num_chunks, HEADS)
        next_tokens = Tokens(t, count, head)
        # No product reads operands any more: copy the next task's inputs.
        _copy_inputs(inputs_s, inputs, next_tokens)
        beta, first_bias, second_bias, rate = _gates(inputs, next_tokens, PART)
        products *= betas_s.load(OF_COLUMN)[None, :]

        tile = tiles + place * CHUNK
        row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, OUT))[:, None]
        column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, OUT))[None, :]
        stored = (row < tokens.count) & (column // SECTOR <= row // SECTOR)  # the second launch loads no more
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
        gl.store(score_tile + step * (CHUNK + 1), own_s.load(FLAT).to(BF16), mask=step < tokens.count)
        set_flag(flags + task)
        task, tokens = next_task, next_tokens
    async_copy.wait_group(0)


prepare = Launcher(_kda_prepare_kernel)
