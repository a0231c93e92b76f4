"""Copy blocks between a GPU and pinned memory of its host."""

from __future__ import annotations

import pytest
import torch

from mambacache.kernels import copy_blocks
from test_kernels_copy_blocks import CASES, int32, pool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("width", "gap", "pairs"), CASES)
def test_blocks_copied_there_and_back_are_equal(width: int, gap: int, pairs: torch.Tensor) -> None:
    """Nothing else changes on either side."""
    device = pool(9, width, gap, 1).cuda()
    host, again = pool(9, width, 0, 2).pin_memory(), pool(9, width, 0, 3).cuda()
    expected, expected_again = host.clone(), again.clone()
    for block, into in pairs.tolist():
        expected[into] = device[block].cpu()
        expected_again[block] = device[block]
    copy_blocks(device, host, pairs.cuda())
    copy_blocks(host, again, pairs.flip(1).contiguous().cuda())
    torch.cuda.synchronize()
    assert torch.equal(host, expected)
    assert torch.equal(again, expected_again)


@pytest.mark.xdist_group("memory")
def test_blocks_beyond_two_billion_words() -> None:
    """Check that offsets have 64 bits."""
    blocks = torch.zeros(9, 1 << 30, dtype=torch.uint8, device="cuda")
    blocks[8] = 7
    host = torch.zeros(2, 1 << 30, dtype=torch.uint8).pin_memory()
    copy_blocks(blocks, host, int32((8, 1)).cuda())
    torch.cuda.synchronize()
    assert host[1].eq(7).all() and not host[0].any()


def test_memory_that_is_not_pinned_is_refused() -> None:
    with pytest.raises(ValueError, match="pin its memory"):
        copy_blocks(pool(3, 32, 0, 1).cuda(), pool(3, 32, 0, 1), int32((1, 1)).cuda())
