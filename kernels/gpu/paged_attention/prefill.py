"""Prefill attention over pages (FlashAttention-2, Dao 2023)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...device import takes_large_tiles
from ...indices import StateIndices
from ..common.chunks import CHUNK, clear_padding, row_and_tile
from ..common.launch import Launcher, index_pointers
from ..common.layout import power_of_2, stride_alignment
from .tile import KV, Pool, attend, empty_softmax, tile_pages

ARRAYS = (
    "query_start_loc",
    "chunk_seq",
    "chunk_start",
    "seq_chunk_start",
    "kv_len",
    "block_table_start",
    "block_table",
)


@triton.jit(
    do_not_specialize=[
        "num_decodes",
        "num_prefills",
        "num_chunks",
        "num_tokens",
        "q_token_stride",
        "q_head_stride",
        "scale",
    ]
)
def _attention_prefill_kernel(
    q,
    key_pages,
    value_pages,
    out,
    query_start_loc,
    chunk_seq,
    chunk_start,
    seq_chunk_start,
    kv_len,
    block_table_start,
    block_table,
    num_decodes,
    num_prefills,
    num_chunks,
    num_tokens,
    q_token_stride,
    q_head_stride,
    scale,
    ALIGNMENT: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """Take last chunks first: they have the most keys."""
    TILES: tl.constexpr = HEADS // TILE_HEADS
    TOKENS: tl.constexpr = CHUNK * TILE_CHUNKS
    place, tile = row_and_tile(TILES)
    chunk = num_chunks - place
    head = tile * TILE_HEADS
    query = tl.arange(0, TILE_HEADS * TOKENS)
    value = tl.arange(0, BLOCK_DV)
    out += head * DV
    if chunk == num_chunks:
        for i in tl.static_range(TILE_HEADS):
            clear_padding(out + i * DV, query_start_loc, num_prefills, num_tokens, value, value < DV, OUT_STRIDE)
        return
    if chunk >= tl.load(seq_chunk_start + num_prefills):
        return
    row = tl.load(chunk_seq + chunk)
    if (chunk - tl.load(seq_chunk_start + row)) % TILE_CHUNKS != 0:
        return

    start, row_end = tl.load(chunk_start + chunk), tl.load(query_start_loc + row + 1)
    behind = chunk + TILE_CHUNKS
    goes_on = behind < tl.load(seq_chunk_start + row + 1)
    count = tl.where(goes_on, tl.load(chunk_start + behind, mask=goes_on, other=0), row_end) - start
    context = tl.load(kv_len + num_decodes + row) - (row_end - start)
    table = block_table + tl.load(block_table_start + num_decodes + row)

    step = query % TOKENS
    filled = (step < count)[:, None]
    channel = tl.arange(0, BLOCK_D)
    token, own_head = (start + step).to(tl.int64), (head + query // TOKENS).to(tl.int64)
    q_row = tl.multiple_of(token * q_token_stride + own_head * q_head_stride, ALIGNMENT)
    queries = tl.load(q + q_row[:, None] + channel[None, :], mask=filled & (channel < D)[None, :], other=0)
    keys = Pool(key_pages + head // GROUP * KEY_STRIDES[2], KEY_STRIDES, D)
    values = Pool(value_pages + head // GROUP * VALUE_STRIDES[2], VALUE_STRIDES, DV)
    position, end = context + step, context + count
    kv = KV(keys, values, table, end, PAGE, BLOCK_N)

    softmax = empty_softmax(TILE_HEADS * TOKENS, BLOCK_DV)
    seen_by_all = (context + 1) // BLOCK_N * BLOCK_N
    pages = tile_pages(kv, 0)
    for first in tl.range(0, seen_by_all, BLOCK_N):
        following = tile_pages(kv, first + BLOCK_N)
        softmax = attend(softmax, queries, kv, pages, first, position, None, scale, False)
        pages = following
    for first in tl.range(seen_by_all, end, BLOCK_N):
        following = tile_pages(kv, first + BLOCK_N)
        softmax = attend(softmax, queries, kv, pages, first, position, None, scale, True)
        pages = following

    y = (softmax.acc / softmax.total[:, None]).to(out.dtype.element_ty)
    out_tile = (step * OUT_STRIDE + query // TOKENS * DV)[:, None] + value[None, :]
    tl.store(out + start.to(tl.int64) * OUT_STRIDE + out_tile, y, mask=filled & (value < DV)[None, :])


_launch = Launcher(_attention_prefill_kernel)


def prefill(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, indices: StateIndices, scale: float, out: Tensor
) -> None:
    """Fill prefill and padding tokens of `out` [F, HQ, DV]; `scale` includes log2(e)."""
    heads, D = q.shape[1:]
    page, key_heads, DV = value_pages.shape[1:]
    group = heads // key_heads
    narrow = q.element_size() == 2
    # 128 queries; fp32 has room for 64.
    tiles = 2 if narrow else 1
    block_n, warps, stages = (64, 8, 4 if max(D, DV) <= 128 else 2) if narrow else (16, 16, 2)
    if not takes_large_tiles(q.get_device()):
        wide = max(D, DV) > 128
        stages = 2 if narrow or not wide else 1
        if narrow and wide:
            tiles, block_n, warps = 1, 32, 4
    tile_heads = tiles if group % 2 == 0 else 1
    num_chunks = indices.chunk_seq.shape[0]
    _launch(
        (num_chunks + 1) * (heads // tile_heads),
        (q, key_pages, value_pages, out),
        index_pointers(indices, ARRAYS),
        (indices.num_decodes, indices.num_prefills, num_chunks, len(q), *q.stride()[:2], scale),
        {
            "ALIGNMENT": stride_alignment(q),
            "KEY_STRIDES": key_pages.stride()[:3],
            "VALUE_STRIDES": value_pages.stride()[:3],
            "OUT_STRIDE": out.stride(0),
            "PAGE": page,
            "HEADS": heads,
            "GROUP": group,
            "D": D,
            "DV": DV,
            "BLOCK_D": max(power_of_2(D), 16),
            "BLOCK_DV": max(power_of_2(DV), 16),
            "BLOCK_N": block_n,
            "TILE_HEADS": tile_heads,
            "TILE_CHUNKS": tiles // tile_heads,
        },
        num_warps=warps,
        num_stages=stages,
    )
