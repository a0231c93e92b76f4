"""The layout of KV pages."""

from __future__ import annotations

import torch

from mambacache.models.layer import KVLayer
from mambacache.runner.kv_pages import allocate_kv_pages, kv_block_bytes


def test_kv_pages() -> None:
    layers = [KVLayer(2, 24, 16, torch.bfloat16), KVLayer(1, 8, 8, torch.float32)]
    pages = allocate_kv_pages(layers, 5, 64)
    assert [(key.shape, value.shape) for key, value in pages] == [
        ((6, 64, 2, 24), (6, 64, 2, 16)),
        ((6, 64, 1, 8), (6, 64, 1, 8)),
    ]
    assert kv_block_bytes(layers, 64) * 6 == sum(x.numel() * x.itemsize for layer in pages for x in layer)
