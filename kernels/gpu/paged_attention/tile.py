"""Attend with a tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4e38)  # finite, so tiles without keys give no NaN


@triton.jit
def tile_pages(table, first, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load pages of BLOCK_N positions; one if tiles never cross pages.

    Loops load a tile ahead, or the compiler spends a pipeline stage on it.
    """
    if PAGE % BLOCK_N == 0:
        return tl.load(table + first // PAGE, mask=first < end, other=0)
    else:
        key = first + tl.arange(0, BLOCK_N)
        return tl.load(table + key // PAGE, mask=key < end, other=0)


@triton.jit
def _page_tile(
    pool,
    pages,
    first,
    end,
    STRIDES: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load keys or values [BLOCK_N, BLOCK_WIDTH]; MASKED gives zeros from `end` on."""
    step, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_WIDTH)[None, :]
    page = pages.to(tl.int64) * STRIDES[0]
    if PAGE % BLOCK_N == 0:  # 32-bit offsets save registers
        place = pool + page + first % PAGE * STRIDES[1] + (step[:, None] * STRIDES[1] + channel)
    else:
        place = pool + (page + (first + step) % PAGE * STRIDES[1])[:, None] + channel
    if MASKED:
        return tl.load(place, mask=(first + step < end)[:, None] & (channel < WIDTH), other=0.0)
    elif WIDTH != BLOCK_WIDTH:
        return tl.load(place, mask=channel < WIDTH, other=0.0)
    else:
        return tl.load(place)


@triton.jit
def attend(
    acc,
    highest,
    total,
    q,
    key_pages,
    value_pages,
    pages,
    first,
    end,
    last,
    ancestors,
    scale,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add BLOCK_N keys to softmax attention (Online normalizer calculation for softmax, Milakov and Gimelshein 2018).

    acc sums values weighted by 2^(score - highest), total the weights. `scale` includes log2(e). MASKED reads nothing
    from `end` on; a query then sees keys up to `last`, or given `ancestors`, before `last` and in its bits.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    BLOCK_DV: tl.constexpr = acc.shape[1]
    k = _page_tile(key_pages, pages, first, end, KEY_STRIDES, PAGE, D, BLOCK_N, BLOCK_D, MASKED).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        key = first + tl.arange(0, BLOCK_N)
        if ancestors is None:
            seen = key[None, :] <= last[:, None]
        else:
            bit = tl.minimum(tl.maximum(key[None, :] - last, 0), 31)
            seen = (key[None, :] < last) | ((ancestors[:, None] >> bit) & 1 == 1)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    decay = tl.exp2(highest - higher)
    v = _page_tile(value_pages, pages, first, end, VALUE_STRIDES, PAGE, DV, BLOCK_N, BLOCK_DV, MASKED).to(q.dtype)
    acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, higher, total * decay + tl.sum(weights, 1)
