"""Decays between the tokens of a chunk, for recurrences that have one log decay per token and head."""

from __future__ import annotations

import triton
import triton.language as tl

from .chunks import CHUNK

LOG2_E = tl.constexpr(1.4426950408889634)
# The smallest log decay of one token between pairs of tokens: e^-24 is nothing beside 1, and differences of larger
# sums would cancel.
MIN_PAIRWISE_LOG_DECAY = tl.constexpr(-24.0)


@triton.jit
def softplus(x):
    small = tl.exp(-tl.abs(x))
    one_more = 1 + small
    log1p = tl.log(one_more) + (small - (one_more - 1)) / one_more  # the second term is what the sum has rounded off
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def pairwise_decays(log2_decay, PRECISE: tl.constexpr):
    """The decay from token j (columns) to token i (rows) [64, 64], 0 for j > i, from log decays / ln 2 [64].

    A running sum loses digits that differences of neighbours still need. `PRECISE` sums apart what is coarse, which is
    exact (12 + 11 bits), and the rest, which is small.
    """
    log2_decay = tl.maximum(log2_decay, MIN_PAIRWISE_LOG_DECAY * LOG2_E)
    coarse = log2_decay
    if PRECISE:
        coarse = tl.floor(log2_decay * 2048) / 2048
    sums = tl.cumsum(coarse, 0)
    differences = sums[:, None] - sums[None, :]
    if PRECISE:
        fine = tl.cumsum(log2_decay - coarse, 0)
        differences += fine[:, None] - fine[None, :]
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.exp2(tl.where(row >= column, differences, float("-inf")))
