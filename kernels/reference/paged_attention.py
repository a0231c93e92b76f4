"""Implement `paged_attention`."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..indices import StateIndices

QUERY_BLOCK = 1024  # bounds the mask


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    indices: StateIndices,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `mambacache.kernels.paged_attention`. Rows run alone, so no result depends on others."""
    written = indices.kv_slot >= 0
    slot, block_size = indices.kv_slot[written].long(), key_pages.shape[1]
    key_pages[slot // block_size, slot % block_size] = k[written].to(key_pages.dtype)
    value_pages[slot // block_size, slot % block_size] = v[written].to(value_pages.dtype)

    out = q.new_zeros(*q.shape[:2], v.shape[2]) if out is None else out.zero_()
    width = indices.tokens_per_decode
    spans = [(row * width, row * width + length) for row, length in enumerate(indices.decode_len.tolist())]
    spans += pairwise(indices.query_start_loc.tolist())
    lengths, table_starts = indices.kv_len.tolist(), indices.block_table_start.tolist()
    for (first, end), length, table_start in zip(spans, lengths, table_starts, strict=False):
        if first == end:
            continue
        pages = indices.block_table[table_start:][: -(-length // block_size)]
        keys = key_pages[pages].flatten(0, 1).transpose(0, 1).to(q.dtype)
        values = value_pages[pages].flatten(0, 1).transpose(0, 1).to(q.dtype)
        for start in range(first, end, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, end)
            visible = length - (end - stop)
            mask = _sees(indices, start, stop, length, visible)
            attended = scaled_dot_product_attention(
                q[start:stop].transpose(0, 1)[None],
                keys[None, :, :visible],
                values[None, :, :visible],
                attn_mask=mask,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[start:stop] = attended[0].transpose(0, 1)
    return out


def _sees(indices: StateIndices, start: int, stop: int, length: int, visible: int) -> Tensor:
    """Return bool [queries, visible]."""
    key = torch.arange(visible, device=indices.device)
    width, row = indices.tokens_per_decode, start // indices.tokens_per_decode
    if row >= indices.num_decodes:
        return key <= indices.positions[start:stop, None]
    begin = length - int(indices.decode_len[row])
    masks = indices.ancestors[row * width + torch.arange(stop - start, device=key.device)]
    return (key < begin) | ((masks[:, None] >> (key - begin).clamp(min=0)) & 1 == 1)
