"""The first launch of prefill for bf16 activations, in Gluon: `inverse`, `scores` and the vectors of all chunks.

Each of four warps has 16 tokens of a chunk, the rows of what it computes. The inverse of 1 + L is that of its blocks of
16 on the diagonal, D, and what is left of them: with C = L D, column by column of blocks from the right,

    X_j = D_j - sum_{k > j} X_k C_kj

where a warp needs of others nothing but D and C. As in `unit_lower_inverse` no operand exceeds 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common import delta_rule
from ..common.chunks import CHUNK
from ..common.decays import LOG2_E, MIN_PAIRWISE_LOG_DECAY
from ..common.delta_rule import BLOCK, NORM_EPS
from ..common.hopper import barrier, clear_flags, copy_tile, set_flag
from ..common.launch import Launcher

WARPS = gl.constexpr(4)
log2_decay = gluon.jit(delta_rule.log2_decay.fn)


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _halves(x):
    """The left and the right half of a matrix."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def _columns(x, LAYOUT: gl.constexpr):
    """The four blocks of 16 columns of [64, 64]."""
    left, right = _halves(x)
    x0, x1 = _halves(left)
    x2, x3 = _halves(right)
    blocks = x0, x1, x2, x3
    return (
        gl.convert_layout(blocks[0], LAYOUT),
        gl.convert_layout(blocks[1], LAYOUT),
        gl.convert_layout(blocks[2], LAYOUT),
        gl.convert_layout(blocks[3], LAYOUT),
    )


@gluon.jit
def _diagonal(columns, block):
    """The blocks on the diagonal, below each other [64, 16]; `block` counts blocks of rows."""
    x = gl.where(block == 2, columns[2], columns[3])
    return gl.where(block == 0, columns[0], gl.where(block == 1, columns[1], x))


@gluon.jit
def _inverse_norms(blocks, same):
    """1 / sqrt(|x|^2 + eps) of every row x, from the blocks on the diagonal of x x^T."""
    return gl.rsqrt(gl.sum(gl.where(same, blocks, 0.0), axis=1) + NORM_EPS)


@gluon.jit
def _block_products(x, y):
    """x y of each of four blocks [64, 16], in fp32 from fp16 operands."""
    BATCH: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, BLOCK, 8])
    x = gl.convert_layout(gl.reshape(x.to(gl.float16), [4, BLOCK, BLOCK]), gl.DotOperandLayout(0, BATCH, 2))
    y_blocks = gl.reshape(y.to(gl.float16), [4, BLOCK, BLOCK])
    y_blocks = gl.convert_layout(y_blocks, gl.DotOperandLayout(1, BATCH, 2))
    product = mma_v2(x, y_blocks, gl.zeros([4, BLOCK, BLOCK], gl.float32, layout=BATCH))
    return gl.convert_layout(gl.reshape(product, [CHUNK, BLOCK]), y.type.layout)


@gluon.jit
def _unit_lower_inverse(columns, blocks_s, block, i, j):
    """The columns of (1 + L)^-1 from those of L, whose diagonal counts as 0; (i, j) are places within blocks."""
    LAYOUT: gl.constexpr = columns[0].type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    inner = _diagonal(columns, block)
    D = gl.where(i == j, 1.0, gl.where(i ^ j == 1, -inner, 0.0))
    for level in gl.static_range(1, 4):
        pairs = gl.where((i ^ j) >> level == 1, inner, 0.0)
        D -= _block_products(D, _block_products(pairs, D))

    blocks_s.index(3).store(D.to(gl.float16))
    barrier()
    zeros = gl.zeros([CHUNK, BLOCK], gl.float32, layout=LAYOUT)
    for k in gl.static_range(3):
        left = gl.convert_layout(columns[k].to(gl.float16), LEFT)
        C = mma_v2(left, blocks_s.index(3).slice(k * BLOCK, BLOCK).load(RIGHT), zeros)
        blocks_s.index(k).store((-C).to(gl.float16))
    barrier()
    X3 = gl.where(block == 3, D, 0.0)
    left3 = gl.convert_layout(X3.to(gl.float16), LEFT)
    X2 = mma_v2(left3, blocks_s.index(2).slice(3 * BLOCK, BLOCK).load(RIGHT), gl.where(block == 2, D, 0.0))
    left2 = gl.convert_layout(X2.to(gl.float16), LEFT)
    X1 = mma_v2(left3, blocks_s.index(1).slice(3 * BLOCK, BLOCK).load(RIGHT), gl.where(block == 1, D, 0.0))
    X1 = mma_v2(left2, blocks_s.index(1).slice(2 * BLOCK, BLOCK).load(RIGHT), X1)
    left1 = gl.convert_layout(X1.to(gl.float16), LEFT)
    X0 = mma_v2(left3, blocks_s.index(0).slice(3 * BLOCK, BLOCK).load(RIGHT), gl.where(block == 0, D, 0.0))
    X0 = mma_v2(left2, blocks_s.index(0).slice(2 * BLOCK, BLOCK).load(RIGHT), X0)
    X0 = mma_v2(left1, blocks_s.index(0).slice(BLOCK, BLOCK).load(RIGHT), X0)
    return X0, X1, X2, X3


@gluon.jit
def _tokens_of(task, num_tasks, indices, num_prefills, num_chunks, VALUE_HEADS: gl.constexpr):
    """A task's first token, how many its chunk has, and its head; none from the last task on. See `chunk_tokens`."""
    query_start_loc, chunk_start, seq_chunk_start = indices
    chunk = gl.minimum(task // VALUE_HEADS, num_chunks - 1)
    filled_chunks = gl.load(seq_chunk_start + num_prefills)
    last_end = gl.load(query_start_loc + num_prefills)
    start = gl.load(chunk_start + chunk)
    following = gl.load(chunk_start + gl.minimum(chunk + 1, num_chunks - 1))
    end = gl.where(chunk + 1 < filled_chunks, following, last_end)
    count = gl.where((chunk < filled_chunks) & (task < num_tasks), end - start, 0)
    return start.to(gl.int64), count, task % VALUE_HEADS


@gluon.jit
def _places(q, k, t, head, Q_STRIDES: gl.constexpr, K_STRIDES: gl.constexpr, GROUP: gl.constexpr):
    """Where a task's queries and keys are."""
    q_place = q + t * Q_STRIDES[0] + head // GROUP * Q_STRIDES[1]
    return q_place, k + t * K_STRIDES[0] + head // GROUP * K_STRIDES[1]


@gluon.jit
def _gates(a, b, A_log, dt_bias, t, count, head, A_STRIDES: gl.constexpr, B_STRIDES: gl.constexpr):
    """What the decays and betas of a task's tokens are computed from."""
    step = gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gate = gl.load(a + head * A_STRIDES[1] + (t + step) * A_STRIDES[0], mask=step < count, other=0)
    beta = gl.load(b + head * B_STRIDES[1] + (t + step) * B_STRIDES[0], mask=step < count, other=0)
    return gate, beta, gl.load(A_log + head), gl.load(dt_bias + head)


@gluon.jit(do_not_specialize=["num_prefills", "num_tokens", "num_chunks"])
def _delta_prepare_kernel(
    q,
    k,
    a,
    b,
    A_log,
    dt_bias,
    tiles,
    vectors,
    flags,
    query_start_loc,
    chunk_start,
    seq_chunk_start,
    num_prefills,
    num_tokens,
    num_chunks,
    Q_STRIDES: gl.constexpr,
    K_STRIDES: gl.constexpr,
    A_STRIDES: gl.constexpr,
    B_STRIDES: gl.constexpr,
    HEADS: gl.constexpr,
    VALUE_HEADS: gl.constexpr,
    K: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """A program takes chunks of value heads, one after the other."""
    BF16: gl.constexpr = gl.bfloat16
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, WIDE)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    by_key: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_K], BF16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], BF16)
    of_blocks: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK], gl.float16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK_K], by_key)
    k_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK_K], by_key)
    tile_s = gl.allocate_shared_memory(BF16, [CHUNK, CHUNK], square)
    blocks_s = gl.allocate_shared_memory(gl.float16, [4, CHUNK, BLOCK], of_blocks)
    sums_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    betas_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    q_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    k_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    indices = query_start_loc, chunk_start, seq_chunk_start
    num_tasks = num_chunks * VALUE_HEADS
    clear_flags(flags, num_tasks, WARPS)
    task = gl.program_id(0)
    t, count, head = _tokens_of(task, num_tasks, indices, num_prefills, num_chunks, VALUE_HEADS)
    q_place, k_place = _places(q, k, t, head, Q_STRIDES, K_STRIDES, VALUE_HEADS // HEADS)
    copy_tile(q_s, q_place, Q_STRIDES[0], count, K, False, WARPS)
    copy_tile(k_s, k_place, K_STRIDES[0], count, K, False, WARPS)
    async_copy.commit_group()
    gate, beta, rate, bias = _gates(a, b, A_log, dt_bias, t, count, head, A_STRIDES, B_STRIDES)
    while task < num_tasks:
        next_task = task + gl.num_programs(0)
        next_t, next_count, next_head = _tokens_of(next_task, num_tasks, indices, num_prefills, num_chunks, VALUE_HEADS)
        step = gl.arange(0, CHUNK, layout=FLAT)
        filled = step < count
        token = t + step
        gate = log2_decay(gate.to(gl.float32), rate.to(gl.float32), bias.to(gl.float32))
        gate = gl.where(filled, gate, 0.0)
        decay = gl.exp2(gl.associative_scan(gate, 0, _add))
        sums = gl.associative_scan(gl.maximum(gate, MIN_PAIRWISE_LOG_DECAY * LOG2_E), 0, _add)
        to_end = gl.exp2(gl.sum(gl.where(step == CHUNK - 1, sums, 0.0), axis=0) - sums)
        sums_s.store(sums)
        betas_s.store(1 / (1 + gl.exp(-beta.to(gl.float32))))

        async_copy.wait_group(0)
        barrier()
        fence_async_shared()
        zeros = gl.zeros([CHUNK, CHUNK], gl.float32, layout=WIDE)
        squares = warpgroup_mma(q_s, q_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_s, k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        row, column = gl.arange(0, CHUNK, layout=OF_ROW)[:, None], gl.arange(0, CHUNK, layout=OF_COLUMN)[None, :]
        pairwise = sums_s.load(OF_ROW)[:, None] - sums_s.load(OF_COLUMN)[None, :]
        pairwise = gl.exp2(gl.where(row >= column, pairwise, float("-inf")))
        row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, NARROW))[:, None]
        block, i = row // BLOCK, row % BLOCK
        j = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, NARROW))[None, :]
        squares = warpgroup_mma_wait(1, deps=[squares])
        q_norm = _inverse_norms(_diagonal(_columns(squares, NARROW), block), i == j) * K**-0.5
        q_norms_s.store(q_norm)
        products = warpgroup_mma(k_s, k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        scores *= pairwise * gl.convert_layout(q_norm, OF_ROW)[:, None]
        tile_s.store(scores.to(BF16))
        products = warpgroup_mma_wait(0, deps=[products])
        k_norm = _inverse_norms(_diagonal(_columns(products, NARROW), block), i == j)
        k_norms_s.store(k_norm)
        barrier()
        # No product reads q and k any more: those of the next task are on their way from here on.
        q_place, k_place = _places(q, k, next_t, next_head, Q_STRIDES, K_STRIDES, VALUE_HEADS // HEADS)
        copy_tile(q_s, q_place, Q_STRIDES[0], next_count, K, False, WARPS)
        copy_tile(k_s, k_place, K_STRIDES[0], next_count, K, False, WARPS)
        async_copy.commit_group()
        gate, beta, rate, bias = _gates(a, b, A_log, dt_bias, next_t, next_count, next_head, A_STRIDES, B_STRIDES)
        scale = k_norms_s.load(OF_COLUMN) * betas_s.load(OF_COLUMN)
        products *= pairwise * gl.convert_layout(k_norm, OF_ROW)[:, None] * scale[None, :]

        tile = tiles + (t * VALUE_HEADS + head) * CHUNK
        row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, OUT))[:, None]
        column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, OUT))[None, :]
        place = row.to(gl.int64) * (VALUE_HEADS * CHUNK) + column
        stored = (row < count) & (column // 8 <= row // 8)  # 8 entries at once; the second launch masks alike
        score_tile = tile + gl.cast(num_tokens, gl.int64) * (VALUE_HEADS * CHUNK)
        gl.store(score_tile + place, tile_s.load(OUT), mask=stored)

        inverse = _unit_lower_inverse(_columns(products, NARROW), blocks_s, block, i, j)
        scale = (k_norm * betas_s.load(gl.SliceLayout(1, NARROW)))[:, None]
        for n in gl.static_range(CHUNK // BLOCK):
            tile_s.slice(n * BLOCK, BLOCK, dim=1).store((inverse[n] * scale).to(BF16))
        barrier()
        gl.store(tile + place, tile_s.load(OUT), mask=stored)

        vector = vectors + head.to(gl.int64) * (4 * num_tokens) + token
        gl.store(vector, decay, mask=filled)
        gl.store(vector + num_tokens, decay * k_norms_s.load(FLAT), mask=filled)
        gl.store(vector + 2 * num_tokens, decay * q_norms_s.load(FLAT), mask=filled)
        gl.store(vector + 3 * num_tokens, to_end, mask=filled)
        set_flag(flags + task)
        task, t, count, head = next_task, next_t, next_count, next_head
    async_copy.wait_group(0)


prepare = Launcher(_delta_prepare_kernel)
