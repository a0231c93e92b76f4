"""Multiply pairs of tokens in Gluon, every channel decayed from one token to the other."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..common.chunks import CHUNK
from ..common.delta_rule import BLOCK
from ..common.hopper import barrier, narrow
from ..common.inverse import rejoined

# Log decay of half a span: keys of norm 1 stay in range, times its exponential or inverse.
MAX_FACTORED_DECAY = gl.constexpr(75.0)


@gluon.jit
def add_near(scores, products, q_s, k_s, right_s):
    """Add the products [64, 64] of q_s and k_s with right_s."""
    PARTS: gl.constexpr = q_s.shape[0]
    for part in gl.static_range(PARTS):
        right = right_s.index(part).permute((1, 0))
        scores = warpgroup_mma(q_s.index(part), right, scores, is_async=True)
        products = warpgroup_mma(k_s.index(part), right, products, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores, products])


@gluon.jit
def _from_middle(sums, SPAN: gl.constexpr):
    """Return log decays, at most 0, between a span's middle and each token [64, C]."""
    LAYOUT: gl.constexpr = sums.type.layout
    C: gl.constexpr = sums.shape[1]
    spans = gl.reshape(sums, [CHUNK // SPAN, SPAN, C])
    PARTS: gl.constexpr = spans.type.layout
    step = gl.arange(0, SPAN, layout=gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))[None, :, None]
    middle = gl.sum(gl.where(step == SPAN // 2 - 1, spans, -0.0), axis=1)[:, None, :]
    exponents = gl.where(step < SPAN // 2, middle - spans, spans - middle)
    return gl.convert_layout(gl.reshape(exponents, [CHUNK, C]), LAYOUT)


@gluon.jit
def _from_middles(sums, span, sums_s):
    LAYOUT: gl.constexpr = sums.type.layout
    exponents = sums
    if span == 32:
        row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))[:, None]
        first = sums_s.to_first_middle.load(gl.SliceLayout(0, LAYOUT))
        second = sums_s.to_second_middle.load(gl.SliceLayout(0, LAYOUT))
        exponents -= gl.where(row < CHUNK // 2, first[None, :], second[None, :])
        exponents = gl.where(row & 16 != 0, exponents, -exponents)
    elif span == 16:
        exponents = _from_middle(sums, 16)
    elif span == 8:
        exponents = _from_middle(sums, 8)
    elif span == 4:
        exponents = _from_middle(sums, 4)
    elif span == 2:
        exponents = _from_middle(sums, 2)
    else:
        exponents -= sums
    return exponents


@gluon.jit
def _add_block(block, left, right_s, start, end, FIRST: gl.constexpr):
    LAYOUT: gl.constexpr = block.type.layout
    right = right_s.slice(FIRST, BLOCK).permute((1, 0)).load(gl.DotOperandLayout(1, LAYOUT, 2))
    new = mma_v2(left, right, gl.zeros([CHUNK, BLOCK], gl.float32, layout=LAYOUT))
    column = FIRST + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return block + gl.where((column >= start) & (column < end), new, 0.0)


@gluon.jit
def _add_diagonal(blocks, left_s, right_s, start, end):
    """Add products to diagonal blocks; columns count within a block."""
    LAYOUT: gl.constexpr = blocks.type.layout
    C: gl.constexpr = left_s.shape[1]
    left = left_s.reshape([4, BLOCK, C]).load(gl.DotOperandLayout(0, LAYOUT, 2))
    right = right_s.reshape([4, BLOCK, C]).permute((0, 2, 1)).load(gl.DotOperandLayout(1, LAYOUT, 2))
    new = mma_v2(left, right, gl.zeros([4, BLOCK, BLOCK], gl.float32, layout=LAYOUT))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return blocks + gl.where((column >= start) & (column < end), new, 0.0)


@gluon.jit
def _add_halves(blocks, left_s, right_s, SPAN: gl.constexpr):
    """Add products of a span's second half with its first; SPAN is 64 or 32."""
    left = left_s.load(gl.DotOperandLayout(0, blocks[0].type.layout, 2))
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, blocks[0].type.layout))[:, None]
    start = row & -SPAN
    end = gl.where(row & (SPAN // 2) != 0, start + SPAN // 2, 0)
    first = _add_block(blocks[0], left, right_s, start, end, 0)
    if SPAN == CHUNK:
        return first, _add_block(blocks[1], left, right_s, start, end, BLOCK), blocks[2], blocks[3]
    else:
        return first, blocks[1], _add_block(blocks[2], left, right_s, start, end, 2 * BLOCK), blocks[3]


@gluon.jit
def power(x):
    """Return the power of two in x, an exact factor in every dtype."""
    return (x.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def rest(x):
    return ((x.to(gl.int32, bitcast=True) & 0x007FFFFF) | 0x3F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _scaled(x, factor):
    """Multiply in bf16, with a quarter of fp32's instructions."""
    code: gl.constexpr = "mul.rn.bf16x2 $0, $1, $2;"
    arguments = [x, narrow(factor)]
    return gl.inline_asm_elementwise(code, "=r,r,r", arguments, dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _add_level(scores, products, sums, part_s, sums_s, left_s, i, SPAN: gl.constexpr):
    q_s, k_s, right_s = part_s.q, part_s.k, part_s.g
    LAYOUT: gl.constexpr = sums.type.layout
    factor = gl.exp2(_from_middles(sums, SPAN, sums_s))
    barrier()
    left_s.store(_scaled(q_s.load(LAYOUT), factor))
    right_s.store(_scaled(k_s.load(LAYOUT), factor))
    barrier()
    if SPAN == CHUNK // 2:
        return _add_halves(scores, left_s, right_s, SPAN), _add_halves(products, right_s, right_s, SPAN)
    else:
        start = i & -SPAN
        end = gl.where(i & (SPAN // 2) != 0, start + SPAN // 2, 0)
        new_scores = _add_diagonal(scores[3], left_s, right_s, start, end)
        new_products = _add_diagonal(products[3], right_s, right_s, start, end)
        scores = scores[0], scores[1], scores[2], new_scores
        return scores, (products[0], products[1], products[2], new_products)


@gluon.jit
def add_far(scores, products, sums, halvings, part_s, sums_s, left_s):
    """Add a part's pair products for far decays; overwrite `part_s`. See `prefill_triton._add_pair_products`.

    `scores` and `products` are three blocks of columns [64, 16] and diagonal blocks [4, 16, 16], times powers of two
    of the norms.
    """
    q_s, k_s, right_s = part_s.q, part_s.k, part_s.g
    LAYOUT: gl.constexpr = sums.type.layout
    q_norms = part_s.q_norms.load(gl.SliceLayout(1, LAYOUT))
    k_norms = part_s.k_norms.load(gl.SliceLayout(1, LAYOUT))
    # At most 1 on both sides of the middle: keys are left and right operands alike.
    factor = gl.exp2(-gl.abs(sums))
    queries = _scaled(q_s.load(LAYOUT), gl.broadcast(power(q_norms)[:, None], sums)[0])
    keys = _scaled(k_s.load(LAYOUT), gl.broadcast(power(k_norms)[:, None], sums)[0])
    q_s.store(queries)
    k_s.store(keys)
    left_s.store(_scaled(queries, factor))
    right_s.store(_scaled(keys, factor))
    barrier()
    scores = _add_halves(scores, left_s, right_s, CHUNK)
    products = _add_halves(products, right_s, right_s, CHUNK)
    i = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, scores[3].type.layout)))[None, :, None]
    # Unrolled: a loop would spill values that it computes ahead.
    for level in gl.static_range(5):
        if halvings > level:
            scores, products = _add_level(scores, products, sums, part_s, sums_s, left_s, i, CHUNK // 2 >> level)
    span = gl.to_tensor(CHUNK // 2) >> halvings
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    exponents = _from_middles(sums, span, sums_s)
    exponents = gl.where(row & (span // 2) != 0, exponents, -exponents)
    factor = gl.exp2(exponents)
    barrier()
    q_s.store(_scaled(q_s.load(LAYOUT), factor))
    keys = k_s.load(LAYOUT)
    k_s.store(_scaled(keys, factor))
    right_s.store(_scaled(keys, gl.exp2(-exponents)))
    barrier()
    if span == CHUNK // 2:
        scores = _add_halves(scores, q_s, right_s, CHUNK // 2)
        products = _add_halves(products, k_s, right_s, CHUNK // 2)
    new_scores = _add_diagonal(scores[3], q_s, right_s, i & -span, i + 1)
    new_products = _add_diagonal(products[3], k_s, right_s, i & -span, i + 1)
    scores = scores[0], scores[1], scores[2], new_scores
    return scores, (products[0], products[1], products[2], new_products)


@gluon.jit
def joined_blocks(blocks, LAYOUT: gl.constexpr):
    """Join the blocks of `add_far`; entries above the diagonal blocks are not 0."""
    NARROW: gl.constexpr = blocks[0].type.layout
    block = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, NARROW))[:, None] // BLOCK
    diagonal = gl.convert_layout(gl.reshape(blocks[3], [CHUNK, BLOCK]), NARROW)
    blocks = (
        gl.where(block == 0, diagonal, blocks[0]),
        gl.where(block == 1, diagonal, blocks[1]),
        gl.where(block == 2, diagonal, blocks[2]),
        diagonal,
    )
    return gl.convert_layout(rejoined(blocks), LAYOUT)
