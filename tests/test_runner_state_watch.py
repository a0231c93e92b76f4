"""The watch over the state pool sees every access outside the kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mambacache.kernels import StatePool, StateTensor
from state_watch import StateWatch

LAYERS = [(StateTensor((3, 8), torch.bfloat16), StateTensor((2, 4, 4), torch.float32))] * 2

ACCESSES: dict[str, Callable[[torch.Tensor, StatePool], object]] = {
    "copy of a block": lambda pool, _: pool.__setitem__(2, pool[1]),
    "copy of rows by index": lambda pool, _: pool.index_copy_(0, torch.tensor([2]), pool[1:2]),
    "gather": lambda pool, _: pool[torch.tensor([1, 2])],
    "gather by list of tensors": lambda pool, _: torch.cat([pool[1:2], pool[2:3]]),
    "scatter": lambda pool, _: pool.__setitem__(torch.tensor([1]), 0.0),
    "clear": lambda pool, _: pool[1].zero_(),
    "clear through the buffer": lambda _, states: states.buffer.zero_(),
    "copy of a whole slab": lambda _, states: states.buffer[:16].copy_(states.buffer[16:32]),
    "clone": lambda pool, _: pool.clone(),
    "contiguous": lambda pool, _: pool.contiguous(),
    "reshape that cannot be a view": lambda pool, _: pool.transpose(1, 3).reshape(-1),
    "other dtype": lambda pool, _: pool.double(),
    "read of a number": lambda pool, _: pool[1, 0, 0, 0].item(),
    "output of an operation": lambda pool, _: torch.exp(torch.zeros(2, 4, 4), out=pool[1]),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", ACCESSES)
def test_access_outside_the_kernels_fails(name: str, inference: bool) -> None:
    states = StatePool(LAYERS, 4)
    with torch.inference_mode(inference), StateWatch(states.buffer), pytest.raises(AssertionError, match="touches"):
        ACCESSES[name](states.layers[1][1], states)


@pytest.mark.parametrize("inference", [False, True])
def test_views_and_other_memory_are_allowed(inference: bool) -> None:
    states = StatePool(LAYERS, 4)
    pool, other = states.layers[0][1], torch.ones(5, 2, 4, 4)
    with torch.inference_mode(inference), StateWatch(states.buffer) as watch:
        views = [pool[1:3], pool.transpose(1, 2), pool.detach(), states.buffer[4:8].view(torch.float32)]
        other[1] = other[2] + 1
        StatePool.from_tensor(states.buffer, LAYERS)
    assert watch.kernel_accesses == 0
    assert all(view.untyped_storage().data_ptr() == states.buffer.data_ptr() for view in views)


def test_access_by_the_kernels_is_counted() -> None:
    states = StatePool(LAYERS, 4)
    planted: dict[str, object] = {"__name__": "mambacache.kernels.planted"}
    exec("def copy(pool):\n    pool[2] = pool[1]", planted)
    with StateWatch(states.buffer) as watch:
        planted["copy"](states.layers[0][1])  # type: ignore[operator]
    assert watch.kernel_accesses == 1
