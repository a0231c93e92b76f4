"""What the delta rules share: gates, norms and the inverse of a chunk's triangular system."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import CHUNK
from .decays import LOG2_E, softplus

BLOCK = tl.constexpr(16)  # diagonal blocks of a chunk's system that are inverted one by one
NORM_EPS = tl.constexpr(1e-6)
TERMS = tl.constexpr(32)  # of an fp32 product, which are added up on tensor cores


@triton.jit
def log2_decay(a, A_log, dt_bias):
    """g / ln 2 for g = -exp(A_log) softplus(a + dt_bias)."""
    return -tl.exp(A_log) * LOG2_E * softplus(a + dt_bias)


@triton.jit
def normalized(x):
    """A vector divided by its norm."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + NORM_EPS)


@triton.jit
def inverse_norms(products):
    """1 / sqrt(|x|^2 + eps) of every row x, from the diagonal of x x^T [64, 64]."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.rsqrt(tl.sum(tl.where(row == column, products, 0.0), axis=1) + NORM_EPS)


@triton.jit
def _nearest_tf32(x):
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def dot(x, y, acc=None):
    """x y + acc for 16-bit operands, or for fp32 ones in three products of TF32 parts.

    The parts are rounded to nearest: those of Triton's tf32x3 are truncated, which makes sums four times less exact.
    Tensor cores truncate every sum, too, after 8 terms. So they add up TERMS of them at most; the others are added
    outside, where sums are rounded. (Subtracted, since Triton would take an addition into the product.)
    """
    if x.dtype == tl.float32:
        x_high, y_high = _nearest_tf32(x), _nearest_tf32(y)
        product = tl.dot(x - x_high, y_high, input_precision="tf32")
        product = tl.dot(x_high, y - y_high, product, input_precision="tf32")
        column = tl.arange(0, x.shape[1])[None, :]
        for first in tl.range(0, x.shape[1], TERMS, num_stages=1):
            part = tl.where((column >= first) & (column < first + TERMS), -x_high, 0.0)
            product -= tl.dot(part, y_high, input_precision="tf32")
        return product if acc is None else acc + product
    else:
        return tl.dot(x, y, acc)


@triton.jit
def _parts(x, DTYPE: tl.constexpr):
    """Return x in bf16, or two parts that together hold 22 bits of it: fp16, or TF32 where the dtype is fp32."""
    if DTYPE == tl.bfloat16:
        return (x.to(tl.bfloat16),)
    elif DTYPE == tl.float16:
        high = x.to(tl.float16)
        return high, (x - high.to(tl.float32)).to(tl.float16)
    else:
        high = _nearest_tf32(x)
        return high, x - high


@triton.jit
def _product(x, y):
    """x y in fp32 from the parts of both."""
    if len(x) == 2:
        product = tl.dot(x[0], y[1], tl.dot(x[1], y[0], input_precision="tf32"), input_precision="tf32")
        return tl.dot(x[0], y[0], product, input_precision="tf32")
    else:
        return tl.dot(x[0], y[0])


@triton.jit
def unit_lower_inverse(system, DTYPE: tl.constexpr):
    """(1 + system)^-1 [64, 64]; the diagonal of `system` counts as 0, and above it must be zeros.

    The system is that of normalised keys and beta <= 2: then no entry of it, of its inverse or of what is formed on the
    way exceeds 2. But entries may be of any smaller size and still count, since they multiply what a state of any
    magnitude leaves. So operands are bf16 or, for fp32, pairs of TF32, whose exponents are fp32's. Pairs of fp16, with
    their 22 bits in half the time, lose what is below 2^-24.

    Blocks of 16 on the diagonal are inverted by merging ever larger pairs of blocks, what they leave by forward
    substitution. (Products of powers of the triangle would be cheaper and wrong: with correlated keys they grow to 1e9
    before they cancel.)
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    block = tl.arange(0, BLOCKS)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.reshape(system, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    inner = tl.sum(tl.where(on_diagonal, blocks, 0.0), axis=2)
    inverse = tl.where(i == j, 1.0, tl.where(i ^ j == 1, -inner, 0.0))
    for level in tl.static_range(1, 4):
        pairs = tl.where((i ^ j) >> level == 1, inner, 0.0)
        parts = _parts(inverse, DTYPE)
        inverse -= _product(parts, _parts(_product(_parts(pairs, DTYPE), parts), DTYPE))

    # With the blocks' inverse D and the rest R of the system: (1 + system)^-1 = D (1 + R D)^-1.
    diagonal = tl.where(on_diagonal, tl.reshape(inverse, [BLOCKS, BLOCK, 1, BLOCK]), 0.0)
    diagonal = _parts(tl.reshape(diagonal, [CHUNK, CHUNK]), DTYPE)
    rest = _parts(tl.reshape(tl.where(on_diagonal, 0.0, blocks), [CHUNK, CHUNK]), DTYPE)
    coupling = _product(rest, diagonal)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    identity = tl.where(row == column, 1.0, 0.0)
    result = identity - coupling  # right in the first two rows of blocks; every round adds one
    coupling = _parts(coupling, DTYPE)
    for _ in tl.static_range(BLOCKS - 2):
        result = identity - _product(coupling, _parts(result, DTYPE))
    return _product(diagonal, _parts(result, DTYPE))
