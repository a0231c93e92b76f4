"""Check the layout of the state pool."""

from __future__ import annotations

import pytest
import torch

import mambacache
from mambacache.kernels import StatePool, StateTensor, state_bytes
from mambacache.kernels.state_pool import ALIGNMENT

# 3 * 10 bfloat16 are 60 bytes, 1 * 5 float32 are 20: both far from a multiple of 256.
LAYERS = [
    (StateTensor((3, 10), torch.bfloat16), StateTensor((2, 4, 8), torch.float32)),
    (StateTensor((1, 5), torch.float32),),
]
BLOCK_BYTES = 256 + 256 + 256


def test_state_bytes_pads_every_tensor() -> None:
    assert state_bytes(LAYERS) == BLOCK_BYTES
    assert state_bytes([[StateTensor((65,), torch.float32)]]) == 512


def test_a_block_is_a_slab_with_tensors_at_aligned_offsets() -> None:
    pool = StatePool(LAYERS, 6)
    assert pool.num_blocks == 6 and pool.buffer.numel() == 7 * BLOCK_BYTES
    offset = 0
    for layer, tensors in zip(LAYERS, pool.layers, strict=True):
        for spec, tensor in zip(layer, tensors, strict=True):
            assert tensor.shape == (7, *spec.shape) and tensor.dtype == spec.dtype
            assert tensor[0].is_contiguous() and tensor.stride(0) * spec.dtype.itemsize == BLOCK_BYTES
            assert tensor.data_ptr() - pool.buffer.data_ptr() == offset and offset % ALIGNMENT == 0
            offset += BLOCK_BYTES // 3
    assert offset == pool.block_bytes == BLOCK_BYTES


def test_tensors_do_not_overlap() -> None:
    pool = StatePool(LAYERS, 3)
    tensors = [tensor for layer in pool.layers for tensor in layer]
    for i, tensor in enumerate(tensors):
        for block in range(4):
            tensor[block] = 10 * i + block
    for i, tensor in enumerate(tensors):
        for block in range(4):
            assert torch.all(tensor[block] == 10 * i + block)


def test_from_tensor_lays_the_pool_into_given_memory() -> None:
    buffer = torch.zeros(5 * BLOCK_BYTES + 100, dtype=torch.uint8)[16:]
    pool = StatePool.from_tensor(buffer, LAYERS)
    assert pool.num_blocks == 4
    pool.layers[1][0][4] = 1.0
    assert buffer[4 * BLOCK_BYTES + 512 :][:4].view(torch.float32) == 1.0
    assert buffer[: 4 * BLOCK_BYTES].count_nonzero() == 0


def test_slots_may_be_further_apart() -> None:
    pool = StatePool.from_tensor(torch.zeros(4 * 1024, dtype=torch.uint8), LAYERS, 1024)
    assert pool.num_blocks == 3 and pool.slabs.shape == (4, BLOCK_BYTES)
    pool.layers[1][0][2] = 1.0
    assert pool.buffer[2 * 1024 + 512 :][:4].view(torch.float32) == 1.0
    for slot in (512, 1000):
        with pytest.raises(ValueError, match=f"slot_bytes is {slot}: give a multiple of 256 that holds the 768 bytes"):
            StatePool.from_tensor(pool.buffer, LAYERS, slot)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(4 * BLOCK_BYTES), "contiguous uint8 vector"),
        (torch.zeros(2, 2 * BLOCK_BYTES, dtype=torch.uint8), "contiguous uint8 vector"),
        (torch.zeros(8 * BLOCK_BYTES, dtype=torch.uint8)[::2], "contiguous uint8 vector"),
        (torch.zeros(4 * BLOCK_BYTES, dtype=torch.uint8)[8:], "multiple of 16 bytes"),
        (torch.zeros(2 * BLOCK_BYTES - 1, dtype=torch.uint8), f"give at least {2 * BLOCK_BYTES}"),
    ],
)
def test_from_tensor_refuses_other_memory(buffer: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StatePool.from_tensor(buffer, LAYERS)


def test_the_pool_is_public_under_both_names() -> None:
    assert mambacache.StatePool is StatePool
