"""A tile of queries and the keys and values that it meets in pages."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4e38)  # the largest score so far where there was none: finite, so that none gives no NaN


@triton.jit
def tile_pages(table, first, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages, of PAGE tokens and listed in `table`, of the BLOCK_N positions from `first` on that come before `end`:
    one, if none of such tiles goes beyond a page.

    Loops ask for those of the next tile: in the same turn the compiler would spend a stage of its pipeline on them.
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
    """Keys or values [BLOCK_N, BLOCK_WIDTH] of the positions from `first` on; if MASKED, zeros from `end` on."""
    step, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_WIDTH)[None, :]
    page = pages.to(tl.int64) * STRIDES[0]
    if PAGE % BLOCK_N == 0:  # offsets of 32 bits, added to a scalar pointer, take half the registers
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
    """Softmax attention of queries [M, D] taken on by BLOCK_N keys (Online normalizer calculation for softmax, Milakov
    and Gimelshein 2018): the sum of values weighted by 2^(score - highest), the highest score, the sum of weights.

    `pages` are what `tile_pages` gives, `scale` includes log2(e). If MASKED, none is read from `end` on, and a query
    sees keys up to its `last` alone; or, given `ancestors`, all before `last` and then those whose bits its own has.
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
