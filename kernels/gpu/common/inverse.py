"""Invert a chunk's triangular system, with four warps of 16 lines each.

With D the inverse of 1 + L's diagonal blocks and C = L D, the inverse has block columns, from the right:

    X_j = D_j - sum_{k > j} X_k C_kj

Warps share only D and C.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .chunks import CHUNK
from .delta_rule import BLOCK
from .hopper import barrier, narrow

WARPS = gl.constexpr(4)


@gluon.jit
def _halves(x):
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def columns(x, LAYOUT: gl.constexpr):
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
def _joined(x, y):
    return gl.reshape(gl.permute(gl.join(x, y), (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])


@gluon.jit
def rejoined(columns):
    """Invert `columns`."""
    return _joined(_joined(columns[0], columns[1]), _joined(columns[2], columns[3]))


@gluon.jit
def diagonal(columns, block):
    x = gl.where(block == 2, columns[2], columns[3])
    return gl.where(block == 0, columns[0], gl.where(block == 1, columns[1], x))


@gluon.jit
def _rounded(x, PACKED: gl.constexpr):
    """Round to bf16. PACKED needs values in pairs."""
    return narrow(x) if PACKED else x.to(gl.bfloat16)


@gluon.jit
def _block_products(x, y, PACKED: gl.constexpr):
    BATCH: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, BLOCK, 8])
    x = gl.convert_layout(gl.reshape(_rounded(x, PACKED), [4, BLOCK, BLOCK]), gl.DotOperandLayout(0, BATCH, 2))
    y_blocks = gl.reshape(_rounded(y, PACKED), [4, BLOCK, BLOCK])
    y_blocks = gl.convert_layout(y_blocks, gl.DotOperandLayout(1, BATCH, 2))
    product = mma_v2(x, y_blocks, gl.zeros([4, BLOCK, BLOCK], gl.float32, layout=BATCH))
    return gl.convert_layout(gl.reshape(product, [CHUNK, BLOCK]), y.type.layout)


@gluon.jit
def unit_lower_inverse(columns, inner, blocks_s, block, i, j, PACKED: gl.constexpr):
    """Return columns of (1 + L)^-1 from L's columns and diagonal `inner`.

    Above the diagonal `inner` must be 0; the diagonal counts as 0. `blocks_s` holds C and D.
    """
    LAYOUT: gl.constexpr = columns[0].type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    D = gl.where(i == j, 1.0, gl.where(i ^ j == 1, -inner, 0.0))
    for level in gl.static_range(1, 4):
        pairs = gl.where((i ^ j) >> level == 1, inner, 0.0)
        D -= _block_products(D, _block_products(pairs, D, PACKED), PACKED)

    blocks_s[3].store(_rounded(D, PACKED))
    barrier()
    zeros = gl.zeros([CHUNK, BLOCK], gl.float32, layout=LAYOUT)
    for k in gl.static_range(3):
        left = gl.convert_layout(_rounded(columns[k], PACKED), LEFT)
        C = mma_v2(left, blocks_s[3].slice(k * BLOCK, BLOCK).load(RIGHT), zeros)
        blocks_s[k].store(_rounded(-C, PACKED))
    barrier()
    X3 = gl.where(block == 3, D, 0.0)
    left3 = gl.convert_layout(_rounded(X3, PACKED), LEFT)
    X2 = mma_v2(left3, blocks_s[2].slice(3 * BLOCK, BLOCK).load(RIGHT), gl.where(block == 2, D, 0.0))
    left2 = gl.convert_layout(_rounded(X2, PACKED), LEFT)
    X1 = mma_v2(left3, blocks_s[1].slice(3 * BLOCK, BLOCK).load(RIGHT), gl.where(block == 1, D, 0.0))
    X1 = mma_v2(left2, blocks_s[1].slice(2 * BLOCK, BLOCK).load(RIGHT), X1)
    left1 = gl.convert_layout(_rounded(X1, PACKED), LEFT)
    X0 = mma_v2(left3, blocks_s[0].slice(3 * BLOCK, BLOCK).load(RIGHT), gl.where(block == 0, D, 0.0))
    X0 = mma_v2(left2, blocks_s[0].slice(2 * BLOCK, BLOCK).load(RIGHT), X0)
    X0 = mma_v2(left1, blocks_s[0].slice(BLOCK, BLOCK).load(RIGHT), X0)
    return X0, X1, X2, X3
