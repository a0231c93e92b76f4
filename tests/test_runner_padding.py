"""A padded step of decode rows gives the logits of the same step without padding, and writes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_driver import tokens_of
from mambacache.kernels import StateIndices
from mambacache.models.adapt import load_model
from mambacache.plan import pad
from mambacache.runner.cuda_graphs import _padding
from runner_driver import Driver, Row


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "kimi_linear"])
@pytest.mark.parametrize(("rows", "width"), [(3, 2), (4, 2), (7, 3)])
def test_padded_step(name: str, rows: int, width: int, tiny_model: Callable[[str], Path]) -> None:
    model = load_model(tiny_model(name))
    found, pools = [], []
    for padded in (False, True):
        driver = Driver(model)
        requests = [driver.add(tokens_of(seed, length)) for seed, length in enumerate((3, 63, 70))]
        driver.logits([Row(request, len(request.tokens) - 1) for request in requests])
        plan = driver.plan([Row(request, drafts=(7,) * (i % 2)) for i, request in enumerate(requests)])
        wanted = plan.arrays["logits_index"]
        if padded:
            at = wanted // plan.tokens_per_decode * width + wanted % plan.tokens_per_decode
            plan, wanted = pad(plan, rows, width), at
        runner = driver.runner
        pages = runner.pages.layers if runner.pages is not None else []
        logits = model.logits(
            StateIndices.from_arrays(plan.arrays, "cpu"), runner.states.layers, runner.logs.layers, pages
        )
        found.append(logits[torch.from_numpy(np.array(wanted if padded else range(len(logits))))])
        pools.append([x.clone() for layer in (*runner.states.layers, *pages) for x in layer])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    for one, other in zip(*pools, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert {name: array.shape for name, array in plan.arrays.items() if name != "block_table"} == {
        name: array.shape for name, array in _padding(rows, width, 2).items() if name != "block_table"
    }


@pytest.mark.parametrize("attention", [False, True])
def test_equal_shapes_give_equal_places(attention: bool) -> None:
    """Neither the arrays behind the block table nor its length move an array."""
    arrays = _padding(3, 2, 4 if attention else 0)
    other = {name: array[:5] if name == "block_table" else array for name, array in arrays.items()}
    if attention:
        other["block_table_start"] = np.minimum(other["block_table_start"], 5)
    one = StateIndices.from_arrays(arrays, "cpu")
    two = StateIndices.from_arrays({**other, "sampled": np.arange(9, dtype=np.int32)}, "cpu")
    for name in arrays:
        starts = [getattr(x, name).data_ptr() - x.flat.data_ptr() for x in (one, two)]
        assert starts[0] == starts[1], name
