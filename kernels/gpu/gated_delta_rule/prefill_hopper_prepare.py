"""Compute `inverse`, `scores` and the vectors of chunks in Gluon; each of four warps has 16 lines."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..common import delta_rule
from ..common.chunks import CHUNK, SECTOR
from ..common.decays import LOG2_E, MIN_PAIRWISE_LOG_DECAY
from ..common.delta_rule import BLOCK, NORM_EPS
from ..common.hopper import Chunks, barrier, clear_flags, copy_tile, set_flag, tokens_of_task
from ..common.inverse import WARPS, columns, diagonal, rejoined, unit_lower_inverse
from ..common.launch import Launcher
from ..common.structs import aggregate

log2_decay = gluon.jit(delta_rule.log2_decay.fn)

WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, CHUNK.value, 16]))
NARROW = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS.value, 1], [16, 8]))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))


@aggregate
class Inputs:
    q: gl.tensor
    k: gl.tensor
    a: gl.tensor
    b: gl.tensor
    A_log: gl.tensor
    dt_bias: gl.tensor
    Q_STRIDES: gl.constexpr
    K_STRIDES: gl.constexpr
    A_STRIDES: gl.constexpr
    B_STRIDES: gl.constexpr
    GROUP: gl.constexpr


@aggregate
class Gates:
    gate: gl.tensor
    beta: gl.tensor
    rate: gl.tensor
    bias: gl.tensor


@aggregate
class Scratch:
    sums: gl.shared_memory_descriptor
    betas: gl.shared_memory_descriptor
    q_norms: gl.shared_memory_descriptor
    k_norms: gl.shared_memory_descriptor
    blocks: gl.tuple


@aggregate
class Products:
    """Hold k k^T, decays between tokens, and norms of keys."""

    products: gl.tensor
    pairwise: gl.tensor
    k_norm: gl.tensor


@gluon.jit
def _add_pairs(x, y, other_x, other_y):
    return x + other_x, y + other_y


@gluon.jit
def _inverse_norms(blocks, same):
    """Return 1 / sqrt(|x|^2 + eps) of every line x, from the diagonal blocks of x x^T."""
    return gl.rsqrt(gl.sum(gl.where(same, blocks, 0.0), axis=1) + NORM_EPS)


@gluon.jit
def places(inputs, t, head):
    """Return pointers to a token's query and key."""
    q = inputs.q + t * inputs.Q_STRIDES[0] + head // inputs.GROUP * inputs.Q_STRIDES[1]
    return q, inputs.k + t * inputs.K_STRIDES[0] + head // inputs.GROUP * inputs.K_STRIDES[1]


@gluon.jit
def gates(inputs, t, count, head):
    step = gl.arange(0, CHUNK, layout=FLAT)
    token = (t + step).to(gl.int64)  # cast late: 32 bits take half the registers of `fused`
    gate = gl.load(inputs.a + head * inputs.A_STRIDES[1] + token * inputs.A_STRIDES[0], mask=step < count, other=0)
    beta = gl.load(inputs.b + head * inputs.B_STRIDES[1] + token * inputs.B_STRIDES[0], mask=step < count, other=0)
    return Gates(gate, beta, gl.load(inputs.A_log + head), gl.load(inputs.dt_bias + head))


@gluon.jit
def decays(raw, count, sums_s, betas_s):
    """Return decays up to each token and sums of bounded log decays. Store these sums and the betas."""
    gate = log2_decay(raw.gate.to(gl.float32), raw.rate.to(gl.float32), raw.bias.to(gl.float32))
    gate = gl.where(gl.arange(0, CHUNK, layout=FLAT) < count, gate, 0.0)
    least = gl.maximum(gate, MIN_PAIRWISE_LOG_DECAY * LOG2_E)
    total, sums = gl.associative_scan((gate, least), 0, _add_pairs)
    sums_s.store(sums)
    betas_s.store(1 / (1 + gl.exp(-raw.beta.to(gl.float32))))
    return gl.exp2(total), sums


@gluon.jit
def store_scores(tile, q_s, k_s, scratch, K: gl.constexpr):
    """Store scores and norms; all warps must wait for them. Return `Products`."""
    zeros = gl.zeros([CHUNK, CHUNK], gl.float32, layout=WIDE)
    squares = warpgroup_mma(q_s, q_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_s, k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, WIDE))[:, None]
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, WIDE))[None, :]
    sums_s = scratch.sums
    pairwise = sums_s.load(gl.SliceLayout(1, WIDE))[:, None] - sums_s.load(gl.SliceLayout(0, WIDE))[None, :]
    pairwise = gl.exp2(gl.where(row >= column, pairwise, float("-inf")))
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, NARROW))[:, None]
    block, same = row // BLOCK, row % BLOCK == gl.arange(0, BLOCK, layout=gl.SliceLayout(0, NARROW))[None, :]
    squares = warpgroup_mma_wait(1, deps=[squares])
    q_norm = _inverse_norms(diagonal(columns(squares, NARROW), block), same) * K**-0.5
    scratch.q_norms.store(q_norm)
    products = warpgroup_mma(k_s, k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    scores *= pairwise * gl.convert_layout(q_norm, gl.SliceLayout(1, WIDE))[:, None]
    tile.store(scores.to(gl.bfloat16))
    products = warpgroup_mma_wait(0, deps=[products])
    k_norm = _inverse_norms(diagonal(columns(products, NARROW), block), same)
    scratch.k_norms.store(k_norm)
    return Products(products, pairwise, k_norm)


@gluon.jit
def store_inverse(tile, found, scratch):
    """Store the inverse of the chunk's system, each line times its beta and norm."""
    scale = scratch.k_norms.load(gl.SliceLayout(0, WIDE)) * scratch.betas.load(gl.SliceLayout(0, WIDE))
    k_norm = gl.convert_layout(found.k_norm, gl.SliceLayout(1, WIDE))[:, None]
    products = found.products * (found.pairwise * k_norm * scale[None, :])
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, NARROW))[:, None]
    block, i = row // BLOCK, row % BLOCK
    j = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, NARROW))[None, :]
    blocks = columns(products, NARROW)
    inverse = unit_lower_inverse(blocks, diagonal(blocks, block), scratch.blocks, block, i, j, False)
    scale = (found.k_norm * scratch.betas.load(gl.SliceLayout(1, NARROW)))[:, None]
    inverse = inverse[0] * scale, inverse[1] * scale, inverse[2] * scale, inverse[3] * scale
    tile.store(rejoined(inverse).to(gl.bfloat16))


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
    BACKWARDS: gl.constexpr,
):
    BF16: gl.constexpr = gl.bfloat16
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    by_key: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_K], BF16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], BF16)
    of_blocks: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK], BF16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK_K], by_key)
    k_s = gl.allocate_shared_memory(BF16, [CHUNK, BLOCK_K], by_key)
    tile_s = gl.allocate_shared_memory(BF16, [CHUNK, CHUNK], square)
    # Separate allocations show the compiler that stores and loads do not overlap.
    blocks_s = (
        gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks),
        gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks),
        gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks),
        gl.allocate_shared_memory(BF16, [CHUNK, BLOCK], of_blocks),
    )
    sums_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    betas_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    q_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    k_norms_s = gl.allocate_shared_memory(gl.float32, [CHUNK], flat)
    chunks = Chunks(query_start_loc, chunk_start, seq_chunk_start, num_prefills, num_chunks)
    inputs = Inputs(
        q, k, a, b, A_log, dt_bias, Q_STRIDES, K_STRIDES, A_STRIDES, B_STRIDES, VALUE_HEADS // HEADS
    )  # fmt: skip
    scratch = Scratch(sums_s, betas_s, q_norms_s, k_norms_s, blocks_s)
    num_tasks = num_chunks * VALUE_HEADS
    clear_flags(flags, num_tasks)
    task = gl.program_id(0)
    t, count, head, place = tokens_of_task(task, chunks, VALUE_HEADS, BACKWARDS)
    q_place, k_place = places(inputs, t, head)
    copy_tile(q_s, q_place, Q_STRIDES[0], count, K)
    copy_tile(k_s, k_place, K_STRIDES[0], count, K)
    async_copy.commit_group()
    raw = gates(inputs, t, count, head)
    while task < num_tasks:
        next_task = task + gl.num_programs(0)
        next_t, next_count, next_head, next_place = tokens_of_task(next_task, chunks, VALUE_HEADS, BACKWARDS)
        step = gl.arange(0, CHUNK, layout=FLAT)
        filled = step < count
        token = t + step
        decay, sums = decays(raw, count, sums_s, betas_s)

        async_copy.wait_group(0)
        barrier()
        fence_async_shared()
        found = store_scores(tile_s, q_s, k_s, scratch, K)
        barrier()
        # No product reads q and k any more: copy the next task's.
        q_place, k_place = places(inputs, next_t, next_head)
        copy_tile(q_s, q_place, Q_STRIDES[0], next_count, K)
        copy_tile(k_s, k_place, K_STRIDES[0], next_count, K)
        async_copy.commit_group()
        raw = gates(inputs, next_t, next_count, next_head)

        tile = tiles + (t * VALUE_HEADS + head) * CHUNK
        row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, OUT))[:, None]
        column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, OUT))[None, :]
        entry = row.to(gl.int64) * (VALUE_HEADS * CHUNK) + column
        stored = (row < count) & (column // SECTOR <= row // SECTOR)  # the second launch loads no more
        score_tile = tile + gl.cast(num_tokens, gl.int64) * (VALUE_HEADS * CHUNK)
        gl.store(score_tile + entry, tile_s.load(OUT), mask=stored)

        store_inverse(tile_s, found, scratch)
        barrier()
        gl.store(tile + entry, tile_s.load(OUT), mask=stored)

        vector = vectors + head.to(gl.int64) * (4 * num_tokens) + token
        gl.store(vector, decay, mask=filled)
        gl.store(vector + num_tokens, decay * k_norms_s.load(FLAT), mask=filled)
        gl.store(vector + 2 * num_tokens, decay * q_norms_s.load(FLAT), mask=filled)
        to_end = gl.exp2(sums_s.slice(CHUNK - 1, 1).load(FLAT) - sums)
        gl.store(vector + 3 * num_tokens, to_end, mask=filled)
        set_flag(flags + place)
        task, t, count, head, place = next_task, next_t, next_count, next_head, next_place
    async_copy.wait_group(0)


prepare = Launcher(_delta_prepare_kernel)
