"""Share code of the delta rules."""

from __future__ import annotations

import triton
import triton.language as tl

from ...device import is_hopper, takes_large_tiles
from .chunks import CHUNK
from .decays import LOG2_E, softplus

BLOCK = tl.constexpr(16)  # size of diagonal blocks
NORM_EPS = tl.constexpr(1e-6)
MAX_FP16 = tl.constexpr(65504.0)
TERMS = tl.constexpr(32)  # of an fp32 product


def scan_tile(V: int, few: bool, narrow: bool, device: int) -> tuple[int, int]:
    """Return the state lines and the warps of a program that carries states.

    If `few`, all programs with 64 lines run at once. `narrow` activations have 16 bits.
    """
    if is_hopper(device):
        # Tiles of 64 lines only if all run at once: they read q and k twice as often.
        return (64, 4) if V <= 64 or few else (128, 8)
    if not narrow:
        return 16, 8  # more lines spill thousands of bytes
    if few:
        return 32, 4
    # Two programs of 64 lines need the shared memory of an A100.
    return (64, 4) if V <= 64 or takes_large_tiles(device) else (128, 8)


@triton.jit
def log2_decay(a, A_log, dt_bias):
    return -tl.exp(A_log) * LOG2_E * softplus(a + dt_bias)


@triton.jit
def normalized(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + NORM_EPS)


@triton.jit
def _nearest_tf32(x):
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def dot(x, y, acc=None):
    """Return x y + acc; fp32 operands take three products of TF32 parts.

    tf32x3 truncates parts, with four times the error. Tensor cores truncate sums: they sum TERMS terms at most. Triton
    would fuse additions into products, but no subtractions.
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
def operand(x, DTYPE: tl.constexpr):
    """Return x as a product's operand; fp16 takes its largest number for all beyond."""
    if DTYPE == tl.float16:
        x = tl.clamp(x, -MAX_FP16, MAX_FP16, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit
def _parts(x, DTYPE: tl.constexpr):
    """Return bf16, or two parts with 22 bits: fp16, or TF32 for fp32."""
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
    if len(x) == 2:
        product = tl.dot(x[0], y[1], tl.dot(x[1], y[0], input_precision="tf32"), input_precision="tf32")
        return tl.dot(x[0], y[0], product, input_precision="tf32")
    else:
        return tl.dot(x[0], y[0])


@triton.jit
def unit_lower_inverse(system, DTYPE: tl.constexpr):
    """Return (1 + system)^-1 [64, 64]. The diagonal of `system` counts as 0; above it must be zeros.

    Values are at most 2, but small values count: operands need fp32's exponents. Pairs of fp16 lose values below 2^-24.

    Diagonal blocks are inverted by merging pairs, the rest by substitution. Powers of the triangle would grow to 1e9.
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

    # (1 + system)^-1 = D (1 + R D)^-1, D inverting diagonal blocks.
    diagonal = tl.where(on_diagonal, tl.reshape(inverse, [BLOCKS, BLOCK, 1, BLOCK]), 0.0)
    diagonal = _parts(tl.reshape(diagonal, [CHUNK, CHUNK]), DTYPE)
    rest = _parts(tl.reshape(tl.where(on_diagonal, 0.0, blocks), [CHUNK, CHUNK]), DTYPE)
    coupling = _product(rest, diagonal)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    identity = tl.where(row == column, 1.0, 0.0)
    result = identity - coupling  # right in two block lines; rounds add a line
    coupling = _parts(coupling, DTYPE)
    for _ in tl.static_range(BLOCKS - 2):
        result = identity - _product(coupling, _parts(result, DTYPE))
    return _product(diagonal, _parts(result, DTYPE))
