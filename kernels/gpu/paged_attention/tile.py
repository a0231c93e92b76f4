"""Attend with a tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.structs import aggregate

LOWEST = tl.constexpr(-3.4e38)  # finite, so tiles without keys give no NaN


@aggregate
class Pool:
    """Hold pages of keys or values, from a head on; STRIDES lead to the next page and position."""

    start: tl.tensor
    STRIDES: tl.constexpr
    WIDTH: tl.constexpr


@aggregate
class KV:
    """Hold a row's keys and values before `end`: `table` lists pages of PAGE positions, a tile has BLOCK_N."""

    keys: Pool
    values: Pool
    table: tl.tensor
    end: tl.tensor
    PAGE: tl.constexpr
    BLOCK_N: tl.constexpr


@aggregate
class Softmax:
    """Hold each query's sum of values weighted by 2^(score - highest), and the weights' total."""

    acc: tl.tensor
    highest: tl.tensor
    total: tl.tensor


@triton.jit
def empty_softmax(QUERIES: tl.constexpr, WIDTH: tl.constexpr):
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    highest = tl.full([QUERIES], LOWEST, tl.float32)
    return Softmax(acc, highest, tl.zeros([QUERIES], tl.float32))


@triton.jit
def tile_pages(kv, first):
    """Load pages of BLOCK_N positions; one if tiles never cross pages.

    Loops load a tile ahead, or the compiler spends a pipeline stage on it.
    """
    if kv.PAGE % kv.BLOCK_N == 0:
        return tl.load(kv.table + first // kv.PAGE, mask=first < kv.end, other=0)
    else:
        key = first + tl.arange(0, kv.BLOCK_N)
        return tl.load(kv.table + key // kv.PAGE, mask=key < kv.end, other=0)


@triton.jit
def _page_tile(pool, kv, pages, first, BLOCK_WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Load keys or values [BLOCK_N, BLOCK_WIDTH]; MASKED gives zeros from `end` on."""
    step, channel = tl.arange(0, kv.BLOCK_N), tl.arange(0, BLOCK_WIDTH)[None, :]
    page = pages.to(tl.int64) * pool.STRIDES[0]
    if kv.PAGE % kv.BLOCK_N == 0:  # 32-bit offsets save registers
        place = pool.start + page + first % kv.PAGE * pool.STRIDES[1] + (step[:, None] * pool.STRIDES[1] + channel)
    else:
        place = pool.start + (page + (first + step) % kv.PAGE * pool.STRIDES[1])[:, None] + channel
    if MASKED:
        return tl.load(place, mask=(first + step < kv.end)[:, None] & (channel < pool.WIDTH), other=0.0)
    elif pool.WIDTH != BLOCK_WIDTH:
        return tl.load(place, mask=channel < pool.WIDTH, other=0.0)
    else:
        return tl.load(place)


@triton.jit
def attend(softmax, queries, kv, pages, first, last, ancestors, scale, MASKED: tl.constexpr):
    """Add BLOCK_N keys to softmax attention (Online normalizer calculation for softmax, Milakov and Gimelshein 2018).

    `scale` includes log2(e). MASKED reads nothing from `end` on; a query then sees keys up to `last`, or given
    `ancestors`, before `last` and in its bits.
    """
    k = _page_tile(kv.keys, kv, pages, first, queries.shape[1], MASKED).to(queries.dtype)
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
    if MASKED:
        key = first + tl.arange(0, kv.BLOCK_N)
        if ancestors is None:
            seen = key[None, :] <= last[:, None]
        else:
            bit = tl.minimum(tl.maximum(key[None, :] - last, 0), 31)
            seen = (key[None, :] < last) | ((ancestors[:, None] >> bit) & 1 == 1)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(softmax.highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    decay = tl.exp2(softmax.highest - higher)
    v = _page_tile(kv.values, kv, pages, first, softmax.acc.shape[1], MASKED).to(queries.dtype)
    acc = tl.dot(weights.to(queries.dtype), v, softmax.acc * decay[:, None], input_precision="ieee")
    return Softmax(acc, higher, softmax.total * decay + tl.sum(weights, 1))
