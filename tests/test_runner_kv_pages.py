"""Check the layout of KV pages."""

from __future__ import annotations

import pytest
import torch

from mambacache.kernels import StateTensor, state_bytes
from mambacache.models.layer import KVLayer
from mambacache.runner.kv_pages import Slab, allocate_kv_pages, allocate_slabs, kv_block_bytes, slab_of


def test_kv_pages() -> None:
    layers = [KVLayer(2, 24, 16, torch.bfloat16), KVLayer(1, 8, 8, torch.float32)]
    pages = allocate_kv_pages(layers, 5, 64)
    assert pages is not None and pages.num_blocks == 5
    assert [(key.shape, value.shape) for key, value in pages.layers] == [
        ((6, 64, 2, 24), (6, 64, 2, 16)),
        ((6, 64, 1, 8), (6, 64, 1, 8)),
    ]
    assert pages.block_bytes == kv_block_bytes(layers, 64) == sum(x[0].nbytes for layer in pages.layers for x in layer)


def test_a_block_is_a_contiguous_piece() -> None:
    """A block holds its views of all layers, and nothing of other blocks."""
    pages = allocate_kv_pages([KVLayer(1, 8, 4, torch.float16), KVLayer(1, 3, 3, torch.float32)], 3, 64)
    assert pages is not None and pages.slabs.is_contiguous()
    pages.slabs.zero_()
    for layer in pages.layers:
        for page in layer:
            page[2] = 1
    assert pages.slabs[2].any() and not pages.slabs[[0, 1, 3]].any()
    assert kv_block_bytes([KVLayer(1, 3, 3, torch.float32)], 64) == 2 * 64 * 3 * 4  # a multiple of 256, as most are
    assert kv_block_bytes([KVLayer(1, 1, 3, torch.float16)], 64) == 256 + 512  # 128 and 384 bytes, aligned


def test_models_without_attention_have_no_pages() -> None:
    assert allocate_kv_pages([], 0, 64) is None and kv_block_bytes([], 64) == 0


# --- slabs that hold states or pages ---


@pytest.mark.parametrize(
    ("state", "page", "expected"),
    [
        (77_266_944, 1_572_864, Slab(1, 49, 77_275_136)),  # Qwen3-Next: rounding up to 50 pages loses more
        (2560, 512, Slab(1, 5, 2560)),
        (512, 512, Slab(1, 1, 512)),
        (512, 2304, Slab(4, 1, 3072)),
        (2304, 5120, Slab(2, 1, 5120)),
        (256 * 99, 256 * 50, Slab(1, 2, 256 * 100)),
    ],
)
def test_a_slab_loses_little(state: int, page: int, expected: Slab) -> None:
    slab = slab_of(state, page)
    assert slab == expected or slab.lost(state, page) < expected.lost(state, page), slab
    assert slab.nbytes % (256 * slab.states) == slab.nbytes % (256 * slab.pages) == 0
    assert slab.nbytes >= max(slab.states * state, slab.pages * page) and min(slab.states, slab.pages) == 1
    if max(state, page) > 20 * min(state, page):
        assert slab.lost(state, page) <= 0.05


@pytest.mark.parametrize("heads", [1, 40])
def test_blocks_of_a_slab_lie_in_it_and_in_no_other(heads: int) -> None:
    states, kv = (
        [(StateTensor((3, 10), torch.float32),), (StateTensor((9, 64), torch.float16),)],
        [KVLayer(heads, 3, 2, torch.float16)],
    )
    slab = slab_of(state_bytes(states), kv_block_bytes(kv, 64))
    assert (slab.states > 1) == (heads > 1)
    pools, counts = allocate_slabs(states, kv, 4, slab, 64), (slab.states, slab.pages)
    assert [len(pool.slabs) for pool in pools] == [5 * count for count in counts]
    memory = pools[0].buffer.view(5, slab.nbytes)
    assert pools[1].buffer is pools[0].buffer
    for pool, count in zip(pools, counts, strict=True):
        for block in range(len(pool.slabs)):
            memory.zero_()
            for tensor in (tensor for layer in pool.layers for tensor in layer):
                tensor[block] = 1
            assert memory[block // count].any() and memory.any(1).sum() == 1
            assert pool.slabs[block].any() and pool.slabs.any(1).sum() == 1
