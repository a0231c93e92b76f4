"""Compute decays."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import CHUNK

LOG2_E = tl.constexpr(1.4426950408889634)
# e^-24 vanishes beside 1; larger sums would cancel.
MIN_PAIRWISE_LOG_DECAY = tl.constexpr(-24.0)

# log2(1 + x) / x for x in [0, 1]
LOG2_1P_RATIO = tl.constexpr(
    (
        1.442681074142456,
        -0.7203412652015686,
        0.468526154756546,
        -0.30128005146980286,
        0.14407308399677277,
        -0.033666159957647324,
    )
)


@triton.jit
def softplus(x):
    small = tl.exp(-tl.abs(x))
    one_more = 1 + small
    log1p = tl.log(one_more) + (small - (one_more - 1)) / one_more  # adds its rounding error
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def log2_softplus(x):
    """Return log2(1 + 2^x) within 1e-5."""
    small = tl.exp2(-tl.abs(x))
    ratio = LOG2_1P_RATIO[5] * small + LOG2_1P_RATIO[4]
    for i in tl.static_range(3, -1, -1):
        ratio = ratio * small + LOG2_1P_RATIO[i]
    return ratio * small + tl.maximum(x, 0.0)


@triton.jit
def log2_sums(log2_decay, PRECISE: tl.constexpr):
    """Return running sums over a chunk's tokens (last axis), in two parts; the second is 0 unless `PRECISE`.

    Differences of one running sum lose digits. `PRECISE` sums coarse parts (12 + 11 bits) exactly, apart from the rest.
    """
    AXIS: tl.constexpr = len(log2_decay.shape) - 1
    log2_decay = tl.maximum(log2_decay, MIN_PAIRWISE_LOG_DECAY * LOG2_E)
    if PRECISE:
        coarse = tl.floor(log2_decay * 2048) / 2048
        return tl.cumsum(coarse, AXIS), tl.cumsum(log2_decay - coarse, AXIS)
    else:
        return tl.cumsum(log2_decay, AXIS), tl.zeros_like(log2_decay)


@triton.jit
def pairwise_decays(sums, fine, PRECISE: tl.constexpr):
    """Return decays from token j (column) to i (line), 0 for j > i, from both parts of `log2_sums`."""
    differences = sums[:, None] - sums[None, :]
    if PRECISE:
        differences += fine[:, None] - fine[None, :]
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.exp2(tl.where(row >= column, differences, float("-inf")))
