"""The layout of KV pages."""

from __future__ import annotations

import torch

from mambacache.models.layer import KVLayer
from mambacache.runner.kv_pages import allocate_kv_pages, kv_block_bytes


def test_kv_pages() -> None:
    layers = [KVLayer(2, 24, 16, torch.bfloat16), KVLayer(1, 8, 8, torch.float32)]
    pages = allocate_kv_pages(layers, 5, 64)
    assert pages is not None and pages.num_blocks == 5
    assert [(key.shape, value.shape) for key, value in pages.layers] == [
        ((6, 64, 2, 24), (6, 64, 2, 16)),
        ((6, 64, 1, 8), (6, 64, 1, 8)),
    ]
    assert pages.block_bytes == kv_block_bytes(layers, 64) == sum(x[0].nbytes for layer in pages.layers for x in layer)


def test_a_block_is_one_contiguous_piece() -> None:
    """And holds what its views hold, of all layers, and nothing of other blocks."""
    pages = allocate_kv_pages([KVLayer(1, 8, 4, torch.float16), KVLayer(1, 3, 3, torch.float32)], 3, 64)
    assert pages is not None and pages.slabs.is_contiguous()
    pages.slabs.zero_()
    for layer in pages.layers:
        for page in layer:
            page[2] = 1
    assert pages.slabs[2].any() and not pages.slabs[[0, 1, 3]].any()
    assert kv_block_bytes([KVLayer(1, 3, 3, torch.float32)], 64) == 2 * 64 * 3 * 4  # a multiple of 256, as most are
    assert kv_block_bytes([KVLayer(1, 1, 3, torch.float16)], 64) == 256 + 512  # 128 and 384 bytes, aligned


def test_models_without_attention_have_none() -> None:
    assert allocate_kv_pages([], 0, 64) is None and kv_block_bytes([], 64) == 0
