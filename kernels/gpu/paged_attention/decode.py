"""Decode attention over pages (Flash-Decoding, Dao et al. 2023).

Split s takes parts s, s + SPLITS, ... of PART tokens; a second launch adds splits. Results depend on the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...device import processors
from ...indices import StateIndices
from ..common.chunks import row_and_tile
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, power_of_2, stride_alignment
from .tile import KV, LOWEST, Pool, attend, empty_softmax, tile_pages

PART = 256
SPLITS = 64
MAX_ROWS = 64  # queries per program
WAVES = 32  # most programs per multiprocessor
ARRAYS = "decode_len", "kv_len", "ancestors", "block_table_start", "block_table"


@triton.jit(do_not_specialize=["num_rows", "tokens_per_decode", "q_token_stride", "q_head_stride", "scale"])
def _attention_decode_kernel(
    q,
    key_pages,
    value_pages,
    sums,
    statistics,
    lengths,
    kv_len,
    ancestors,
    block_table_start,
    block_table,
    num_rows,
    tokens_per_decode,
    q_token_stride,
    q_head_stride,
    scale,
    ALIGNMENT: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Take first splits of all rows first: later splits may not exist."""
    tiles = tl.cdiv(tokens_per_decode * GROUP, BLOCK_M)
    programs = num_rows * (HEADS // GROUP) * tiles
    index = tl.program_id(0) % programs
    row = index // tiles // (HEADS // GROUP)
    key_head = index // tiles % (HEADS // GROUP)
    length, num_keys = tl.load(lengths + row), tl.load(kv_len + row)
    table = block_table + tl.load(block_table_start + row)
    if length == 0:
        return

    query = index % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    step, head = query // GROUP, (key_head * GROUP + query % GROUP).to(tl.int64)
    token = row.to(tl.int64) * tokens_per_decode + step
    filled = (step < length)[:, None]
    seen = tl.load(ancestors + token, mask=step < length, other=0)
    channel, value = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    place = tl.multiple_of(token * q_token_stride + head * q_head_stride, ALIGNMENT)
    queries = tl.load(q + place[:, None] + channel, mask=filled & (channel < D), other=0)
    keys = Pool(key_pages + key_head * KEY_STRIDES[2], KEY_STRIDES, D)
    values = Pool(value_pages + key_head * VALUE_STRIDES[2], VALUE_STRIDES, DV)
    kv = KV(keys, values, table, num_keys, PAGE, BLOCK_N)

    last = tl.minimum(tl.cdiv(num_keys, PART), SPLITS)
    for split in tl.range(tl.program_id(0) // programs, last, tl.num_programs(0) // programs, num_stages=1):
        softmax = empty_softmax(BLOCK_M, BLOCK_DV)
        left = num_keys - split * PART
        rest = tl.minimum(left % (SPLITS * PART), PART)
        first = split * PART
        pages = tile_pages(kv, first)
        for i in tl.range(1, left // (SPLITS * PART) * (PART // BLOCK_N) + tl.cdiv(rest, BLOCK_N) + 1):
            next_first = (i // (PART // BLOCK_N) * SPLITS + split) * PART + i % (PART // BLOCK_N) * BLOCK_N
            next_pages = tile_pages(kv, next_first)
            softmax = attend(softmax, queries, kv, pages, first, num_keys - length, seen, scale, True)
            first, pages = next_first, next_pages
        result = (tl.cast(split, tl.int64) * num_rows * tokens_per_decode + token) * HEADS + head
        tl.store(sums + result[:, None] * DV + value, softmax.acc, mask=filled & (value < DV))
        tl.store(statistics + 2 * result, softmax.highest, mask=step < length)
        tl.store(statistics + 2 * result + 1, softmax.total, mask=step < length)


@triton.jit(do_not_specialize=["num_rows", "tokens_per_decode"])
def _attention_combine_kernel(
    sums,
    statistics,
    out,
    lengths,
    kv_len,
    num_rows,
    tokens_per_decode,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PART: tl.constexpr,
    SPLITS: tl.constexpr,
):
    token, head = row_and_tile(HEADS)
    row, step = token // tokens_per_decode, token % tokens_per_decode
    num_splits = tl.minimum(tl.cdiv(tl.load(kv_len + row), PART), SPLITS)
    num_splits = tl.where(step < tl.load(lengths + row), num_splits, 0)
    stride = num_rows.to(tl.int64) * tokens_per_decode * HEADS
    result = token.to(tl.int64) * HEADS + head
    value = tl.arange(0, BLOCK_DV)
    every = tl.arange(0, SPLITS)
    highest = tl.load(statistics + 2 * (every * stride + result), mask=every < num_splits, other=LOWEST)
    highest = tl.max(highest, 0)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        exists = split < num_splits
        each = split * stride + result
        weight = tl.exp2(tl.load(statistics + 2 * each, mask=exists, other=LOWEST) - highest)
        total += weight * tl.load(statistics + 2 * each + 1, mask=exists, other=0)
        mask = exists[:, None] & (value < DV)[None, :]
        parts = tl.load(sums + each[:, None] * DV + value[None, :], mask=mask, other=0)
        acc += tl.sum(weight[:, None] * parts, 0)
    y = acc / tl.where(num_splits > 0, tl.sum(total, 0), 1.0)
    tl.store(out + token.to(tl.int64) * OUT_STRIDE + head * DV + value, y.to(out.dtype.element_ty), mask=value < DV)


_launch = Launcher(_attention_decode_kernel)
_launch_combine = Launcher(_attention_combine_kernel)


def decode(q: Tensor, key_pages: Tensor, value_pages: Tensor, indices: StateIndices, scale: float, out: Tensor) -> None:
    """Fill the decode tokens of `out` [F, HQ, DV]; `scale` includes log2(e).

    Scratch: 4 (DV + 2) bytes per split, token and query head.
    """
    heads, D = q.shape[1:]
    blocks, page, key_heads, DV = value_pages.shape
    rows, width = indices.num_decodes, indices.tokens_per_decode
    group, narrow = heads // key_heads, q.element_size() == 2
    splits = min(SPLITS, cdiv(blocks * page, PART))
    sums = q.new_empty(splits, rows * width, heads, DV, dtype=torch.float32)
    statistics = q.new_empty(splits, rows * width, heads, 2, dtype=torch.float32)
    block_m = min(max(power_of_2(width * group), 16), MAX_ROWS)
    block_d, block_dv = (max(power_of_2(size), 16) for size in (D, DV))
    tiles = rows * key_heads * cdiv(width * group, block_m)
    _launch(
        tiles * min(splits, cdiv(WAVES * processors(q.get_device()), tiles)),
        (q, key_pages, value_pages, sums, statistics),
        index_pointers(indices, ARRAYS),
        (rows, width, *q.stride()[:2], scale),
        {
            "ALIGNMENT": stride_alignment(q),
            "KEY_STRIDES": key_pages.stride()[:3],
            "VALUE_STRIDES": value_pages.stride()[:3],
            "PAGE": page,
            "HEADS": heads,
            "GROUP": group,
            "D": D,
            "DV": DV,
            "BLOCK_M": block_m,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "BLOCK_N": 32 if narrow else 16,
            "PART": PART,
            "SPLITS": SPLITS,
        },
        num_warps=4 if narrow else 8,
        num_stages=4 if block_d + block_dv <= 256 else 3,
    )
    _launch_combine(
        rows * width * heads,
        (sums, statistics, out),
        index_pointers(indices, ARRAYS[:2]),
        (rows, width),
        {
            "OUT_STRIDE": out.stride(0),
            "HEADS": heads,
            "DV": DV,
            "BLOCK_DV": block_dv,
            "BLOCK_S": 16,
            "PART": PART,
            "SPLITS": SPLITS,
        },
        num_warps=2,
    )
