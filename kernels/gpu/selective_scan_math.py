"""What the kernels of the selective scan share: step sizes, gates, and rows of B and C in tiles of four states."""

from __future__ import annotations

import triton
import triton.language as tl

from .decays import LOG2_E

LOG2_E_REST = tl.constexpr(1.9259629891e-08)  # what fp32 rounds off LOG2_E
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def step_size(dt, bias):
    """softplus(dt + bias) = max(x, 0) + log(1 + e) with e = exp(-|x|), as exact for steps of 1e-6 as for others.

    The exponential has its argument in two parts; log(1 + e) / e is a polynomial, off by 3e-8 of it at most.
    """
    x = dt + bias
    power = tl.abs(x) * -LOG2_E
    rest = tl.fma(tl.abs(x), -LOG2_E_REST, tl.fma(tl.abs(x), -LOG2_E, -power))
    e = tl.exp2(power)
    e = tl.fma(e, rest * LN_2, e)
    series = tl.fma(e, 0.005232688, -0.029505214)
    series = tl.fma(e, series, 0.07822591)
    series = tl.fma(e, series, -0.13663243)
    series = tl.fma(e, series, 0.19106005)
    series = tl.fma(e, series, -0.24842982)
    series = tl.fma(e, series, 0.33319098)
    series = tl.fma(e, series, -0.49999493)
    series = tl.fma(e, series, 0.99999994)
    return tl.fma(e, series, tl.maximum(x, 0.0))


@triton.jit
def silu(z):
    return z / (1 + tl.exp2(z * -LOG2_E))


@triton.jit
def split_four(tile):
    """The four columns of a tile [..., 4]."""
    even, odd = tl.split(tl.reshape(tile, tile.shape[:-1] + (2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def store_states(S, target, dst):
    """Stores the states, tiles of every fourth one, in block `dst` unless that is null."""
    state, slot_stride, element, inside = target
    if dst != 0:
        four = tl.reshape(tl.join(tl.join(S[0], S[2]), tl.join(S[1], S[3])), element.shape)
        tl.store(state + dst * slot_stride + element, four.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _halves(pair, DTYPE: tl.constexpr):
    """The two 16-bit numbers of an int32, in fp32."""
    if DTYPE == tl.bfloat16:
        return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = pair.to(tl.int16), (pair >> 16).to(tl.int16)
        return low.to(DTYPE, bitcast=True).to(tl.float32), high.to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def load_row(row, n, N: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr):
    """Of one token the numbers of states n to n + 3: as one of 64 bits if PACKED, otherwise as four."""
    if PACKED:
        packed = row.to(tl.pointer_type(tl.int64)) + n // 4
        if N == BLOCK_N:
            return (tl.load(packed),)
        else:
            return (tl.load(packed, mask=n < N, other=0),)
    else:
        four = ()
        for i in tl.static_range(4):
            four = four + (tl.load(row + n + i, mask=n + i < N, other=0),)
        return four


@triton.jit
def floats(row, DTYPE: tl.constexpr, PACKED: tl.constexpr):
    """A row as loaded, as four tiles in fp32."""
    if PACKED:
        return _halves(row[0].to(tl.int32), DTYPE) + _halves((row[0] >> 32).to(tl.int32), DTYPE)
    else:
        return row[0].to(tl.float32), row[1].to(tl.float32), row[2].to(tl.float32), row[3].to(tl.float32)
