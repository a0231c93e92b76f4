"""The batches that an engine runs before its first request take every kernel that a later step can take."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from gpu_cases import served_as
from kernel_cases import Row, plan_arrays
from mambacache.kernels import StateIndices, api, experts, gpu, ngrams, paths
from mambacache.kernels.compilation import Zeros
from mambacache.kernels.gpu.common.chunks import keep_busy
from mambacache.kernels.gpu.common.launch import Launcher
from mambacache.kernels.gpu.kda.prefill_hopper_persistent import MIN_TURNS
from mambacache.models.adapt import load_model
from mambacache.plan import SequenceStep
from mambacache.warm_up import decode_row, prompt_row, prompts_of_every_form, warm_up_batches
from runner_driver import Driver
from selection import ONE_OF_EACH_FAMILY, full, parameter
from tiny_models import TINY_MODELS, save_tiny_model

PROCESSORS = 132  # of an H100 or H200


def form(lengths: list[int], heads: int) -> str:
    """Return the form of the gated delta rule's prefill, for values of 128 channels."""
    if 2 * heads * len(lengths) <= PROCESSORS:
        return "few"
    indices = StateIndices.from_arrays(plan_arrays([], [Row(length) for length in lengths]), "cpu")
    return "busy" if keep_busy(indices, heads, PROCESSORS) else "uneven"


@pytest.mark.parametrize("heads", [4, 8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("room", [2048, 8192, 16384])
def test_every_form_of_prefill_is_among_the_batches(heads: int, room: int) -> None:
    batches = prompts_of_every_form(room, room, 64)
    assert {form(lengths, heads) for lengths in batches} == {"few", "busy", "uneven"}


@pytest.mark.parametrize("heads", [4, 8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("room", [2048, 8192, 16384])
def test_every_form_of_the_prefill_of_kda_is_among_the_batches(heads: int, room: int) -> None:
    """It goes by states in turn if it is busy and has many of them. Busy rows of few states are `uneven`."""

    def kda_form(lengths: list[int]) -> str:
        found, many = form(lengths, heads), heads * len(lengths) >= MIN_TURNS * PROCESSORS
        return "uneven" if found == "busy" and not many else found

    possible = {"few", "uneven", "busy"} if heads * 64 >= MIN_TURNS * PROCESSORS else {"few", "uneven"}
    assert {kda_form(lengths) for lengths in prompts_of_every_form(room, room, 64)} == possible


@pytest.mark.parametrize("room", [1, 2, 33, 64, 320, 8192])
@pytest.mark.parametrize("longest", [1, 16, 320, 8192])
@pytest.mark.parametrize("rows", [1, 2, 64, 1000])
@pytest.mark.parametrize("width", [1, 8])
def test_batches_fit_into_every_budget(room: int, longest: int, rows: int, width: int) -> None:
    for batch in warm_up_batches(room, longest, rows, width):
        lengths = [row.num_tokens for row in batch]
        assert 0 < len(batch) <= rows and sum(lengths) <= room and min(lengths) > 0
        assert all(row.num_tokens <= (longest if row.prefill else width) for row in batch)


def random_batch(rng: random.Random, width: int) -> list[SequenceStep]:
    own, late = rng.randint(1, width), rng.choice([0, width - 1])
    decodes = [rng.randint(1, own) for _ in range(rng.choice([0, 1, 2, 15, 16, 17, 40]))]
    prompts = [rng.randint(1, rng.choice([2, 40, 700])) for _ in range(rng.choice([0, 1, 2, 16, 33]))]
    prompts = prompts or [1] * (not decodes)
    rows = [decode_row(str(i), tokens, late) for i, tokens in enumerate(decodes)]
    return rows + [prompt_row(str(-i), tokens) for i, tokens in enumerate(prompts, 1)]


WARMED_UP = [
    *[parameter(("", name), name in ONE_OF_EACH_FAMILY) for name in TINY_MODELS],
    *[("sm80", name) for name in ("qwen3_next", "kimi_linear", "nemotron_h")],
]


@pytest.mark.parametrize("width", [*full(1), 4])
@pytest.mark.parametrize(("capability", "name"), WARMED_UP)
def test_no_batch_takes_a_kernel_that_was_not_warmed_up(
    capability: str, name: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Note kernels instead of launching them. With four processors few rows keep them busy."""
    taken: set[Any] = set()

    def note(
        self: Launcher, programs: int, tensors: Any, indices: Any, numbers: Any, constants: Any, **options: int
    ) -> None:
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        aligned = [tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors]
        taken.add((id(self.kernel), self.kernel.__name__, *dtypes, *aligned, *constants.items(), *options.items()))

    monkeypatch.setattr(Launcher, "__call__", note)
    for ops in (api, experts, ngrams, paths):
        monkeypatch.setattr(ops, "backend", lambda x: Zeros(gpu))
    for module in [module for name, module in sys.modules.items() if name.startswith("mambacache.kernels.gpu")]:
        for function, value in (("processors", 4), ("served", not capability)):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda *_, value=value: value)
    with served_as(capability):
        driver = Driver(load_model(save_tiny_model(name, tmp_path), "bfloat16"))
        if width > 1:
            driver.runner.draft(8192, width - 1, 64)
        driver.runner.warm_up(warm_up_batches(8192, 8192, 64, width), 64)
        known, rng = set(taken), random.Random(0)
        assert known
        for _ in range(40):
            batch = random_batch(rng, width)
            driver.runner.warm_up([batch], 64)
            assert taken == known, (sorted(map(str, taken - known)), [(row.prefill, row.num_tokens) for row in batch])


# Other tests of a model compile its kernels in float32; in bfloat16 one model for each op is enough.
ON_A_GPU = [
    pytest.param(name, dtype, marks=pytest.mark.xdist_group(f"model {name}"))
    for dtype, names in (("float32", TINY_MODELS), ("bfloat16", ONE_OF_EACH_FAMILY))
    for name in names
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), ON_A_GPU)
def test_no_step_compiles_a_kernel(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    for module in [module for name, module in sys.modules.items() if name.startswith("mambacache.kernels.gpu")]:
        for launcher in [each for each in vars(module).values() if isinstance(each, Launcher)]:
            monkeypatch.setattr(launcher, "variants", {})
            launcher.kernel.device_caches.clear()  # other tests have compiled some kernels in this process
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **rest: compiled.append(fn.name))
    driver = Driver(load_model(save_tiny_model(name, tmp_path), dtype, "cuda"))
    driver.runner.draft(8192, 3, 64)
    driver.runner.warm_up(warm_up_batches(8192, 8192, 64, 4), 64)
    assert compiled
    compiled.clear()
    rng = random.Random(1)
    driver.runner.warm_up([random_batch(rng, 4) for _ in range(200)], 64)
    assert not compiled
