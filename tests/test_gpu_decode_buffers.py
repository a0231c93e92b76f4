"""Check the launches of a fill of decode buffers, and fills that run ahead of the device."""

from __future__ import annotations

import pytest
import torch

from kernel_cases import Row, plan_arrays
from mambacache.kernels import StateIndices
from test_gpu_launches import launched

pytestmark = pytest.mark.gpu

ROWS = 64


def test_a_fill_is_a_single_transfer() -> None:
    buffers = StateIndices.decode_buffers(ROWS, 2, "cuda")
    arrays = plan_arrays([Row(2, 1, 2)] * 5, [])
    names = launched(lambda: buffers.fill(arrays, 8))
    assert len(names) == 1 and "HtoD" in names[0], names


def test_fills_that_run_ahead_of_the_device_do_not_overtake_each_other() -> None:
    buffers = StateIndices.decode_buffers(ROWS, 1, "cuda")
    steps = [plan_arrays([Row(1, block, block)] * ROWS, []) for block in range(1, 201)]
    torch.cuda._sleep(1_000_000_000)  # nothing arrives for half a second
    seen = [buffers.fill(arrays, ROWS).decode_src.clone() for arrays in steps]
    torch.cuda.synchronize()
    for block, src in enumerate(seen, 1):
        assert (src == block).all()
