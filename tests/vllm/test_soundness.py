"""Check the test of vLLM's pages for NaN: layouts, dtypes, and the way back to the scheduler."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from mambacache.vllm.soundness import Answer, _by_page, attach, finite_pages

PAGES = 6
SHAPES = {
    "keys and values first": ((2, PAGES, 4, 2, 8), 1),
    "pages first": ((PAGES, 2, 4, 2, 8), 0),
    "one latent": ((PAGES, 4, 16), 0),
    "two kernel blocks a page": ((2, 2 * PAGES, 2, 2, 8), 1),
}


def bad_pages(cache: torch.Tensor, dim: int, dtype: str, bad: int) -> list[bool]:
    rows = cache.shape[dim] // PAGES
    floats = cache.view(torch.float8_e4m3fn) if dtype == "fp8" else cache
    floats.select(dim, bad * rows + rows - 1)[..., -1] = torch.nan
    view = _by_page(cache, SimpleNamespace(cache_dtype=dtype, num_gpu_blocks=PAGES))
    assert view is not None
    return finite_pages([view, view], range(PAGES))


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_page_that_holds_a_nan_is_found(shape: str, dtype: str) -> None:
    sizes, dim = SHAPES[shape]
    cache = torch.zeros(sizes, dtype=torch.uint8 if dtype == "fp8" else torch.bfloat16)
    assert bad_pages(cache, dim, dtype, 4) == [True, True, True, True, False, True]


def test_values_that_are_no_plain_floats_are_not_tested() -> None:
    cache = torch.zeros(PAGES, 4, 656, dtype=torch.uint8)
    assert _by_page(cache, SimpleNamespace(cache_dtype="fp8_ds_mla", num_gpu_blocks=PAGES)) is None
    assert finite_pages([], [1, 2]) == [True, True]


def test_an_answer_goes_with_an_output_and_leaves_the_shared_output_alone() -> None:
    found = Answer([True, False], [3])
    output = pickle.loads(pickle.dumps(attach(EMPTY_MODEL_RUNNER_OUTPUT, found)))
    assert output.mambacache_sound == found and not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "mambacache_sound")
    later = SimpleNamespace(get_output=lambda: EMPTY_MODEL_RUNNER_OUTPUT)
    assert attach(later, found).get_output().mambacache_sound == found
