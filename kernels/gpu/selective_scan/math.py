"""Define the arithmetic of a token.

Tiles are [lanes of a channel, channels, ...]. A lane holds groups of four neighbouring states: a tuple with a tile per
state. `fma` is explicit, so all kernels and tiles round alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.decays import LOG2_E
from ..common.layout import power_of_2
from ..common.structs import aggregate

LOG2_E_REST = tl.constexpr(1.9259629891e-08)
LN_2 = tl.constexpr(0.6931471805599453)
EXP2_BIAS = tl.constexpr(2.0**-25)


@aggregate
class Lanes:
    """Hold each lane's first state [LANES, 1, 1], the states of a channel, and a lane's groups of four."""

    first: tl.tensor
    N: tl.constexpr
    FOURS: tl.constexpr


@aggregate
class Weights:
    """Hold A / ln 2, a tuple of states, D and the step sizes' bias."""

    rates: tl.tuple
    skip: tl.tensor
    bias: tl.tensor


@triton.jit
def step_size(dt, bias):
    """Return softplus(dt + bias) = max(x, 0) + log(1 + e), with e = exp(-|x|).

    A polynomial gives log(1 + e) / e within 3e-8: steps of 1e-6 stay accurate.
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


def tile_of(width: int, lanes: int) -> tuple[int, int]:
    """Return a tile's states and the lanes per channel, which are `lanes` for 16 states."""
    block_N = max(power_of_2(width), 4)
    return block_N, min(max(lanes * block_N // 16, 1), 8)


@triton.jit
def channels_of(COUNT: tl.constexpr):
    """Return channels [1, COUNT, 1] backwards: in order, the compiler would make channels neighbours, not lanes."""
    return COUNT - 1 - tl.arange(0, COUNT)[None, :, None]


@triton.jit
def of_lane(tile, j: tl.constexpr):
    if tile.shape[0] == 1:
        return tile
    else:
        return tl.gather(tile, tl.full((1, tile.shape[1], tile.shape[2]), j, tl.int32), 0)


@triton.jit
def first_state(LANES: tl.constexpr, FOURS: tl.constexpr):
    """Return each lane's first state [LANES, 1, 1].

    Lanes are bit-reversed, so the order of a sum over states does not depend on their number.
    """
    lane = tl.arange(0, LANES)[:, None, None]
    if LANES == 8:
        lane = (lane & 1) * 4 + (lane & 2) + lane // 4
    elif LANES == 4:
        lane = (lane & 1) * 2 + lane // 2
    return lane * (4 * FOURS)


@triton.jit
def _fourth():
    return tl.arange(0, 4)[None, None, None, :]


@triton.jit
def load_states(matrix, element, lanes, mask):
    """Load states at places `element` in fp32; zeros outside the mask."""
    states = ()
    for i in tl.static_range(lanes.FOURS):
        inside = tl.expand_dims(mask, 3) & (tl.expand_dims(lanes.first + 4 * i, 3) + _fourth() < lanes.N)
        tile = tl.load(matrix + tl.expand_dims(element + 4 * i, 3) + _fourth(), mask=inside, other=0).to(tl.float32)
        even, odd = tl.split(tl.reshape(tile, tile.shape[:3] + (2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        states = states + (first, second, third, fourth)
    return states


@triton.jit
def store_states(matrix, element, lanes, mask, states):
    for i in tl.static_range(0, len(states), 4):
        inside = tl.expand_dims(mask, 3) & (tl.expand_dims(lanes.first + i, 3) + _fourth() < lanes.N)
        tile = tl.join(tl.join(states[i], states[i + 2]), tl.join(states[i + 1], states[i + 3]))
        tile = tl.reshape(tile, states[0].shape + (4,)).to(matrix.dtype.element_ty)
        tl.store(matrix + tl.expand_dims(element + i, 3) + _fourth(), tile, mask=inside)


@triton.jit
def in_log2(rates):
    result = ()
    for i in tl.static_range(len(rates)):
        result = result + (rates[i] * LOG2_E,)
    return result


@triton.jit
def rounded(states, DTYPE: tl.constexpr):
    result = ()
    for i in tl.static_range(len(states)):
        result = result + (states[i].to(DTYPE).to(tl.float32),)
    return result


@triton.jit
def _decay(d, rate):
    """Return exp(d A) within 2^-23, for a rate A / ln 2.

    The processor's exponential is too small on average, and states add up such errors.
    """
    return tl.exp2(tl.fma(d, rate, EXP2_BIAS))


@triton.jit
def advance(S, d, u, rates, b, c):
    """Apply one token. Return the states exp(d A) S + u B and their product with C."""
    states, sums = (), ()
    for i in tl.static_range(0, len(S), 4):
        s0 = tl.fma(_decay(d, rates[i]), S[i], u * b[i])
        s1 = tl.fma(_decay(d, rates[i + 1]), S[i + 1], u * b[i + 1])
        s2 = tl.fma(_decay(d, rates[i + 2]), S[i + 2], u * b[i + 2])
        s3 = tl.fma(_decay(d, rates[i + 3]), S[i + 3], u * b[i + 3])
        states = states + (s0, s1, s2, s3)
        sums = sums + (tl.fma(s3, c[i + 3], tl.fma(s2, c[i + 2], tl.fma(s1, c[i + 1], s0 * c[i]))),)
    for _ in tl.static_range(4):
        if len(sums) > 1:
            pairs = ()
            for i in tl.static_range(0, len(sums), 2):
                pairs = pairs + (sums[i] + sums[i + 1],)
            sums = pairs
    return states, tl.sum(sums[0], axis=0, keep_dims=True)
