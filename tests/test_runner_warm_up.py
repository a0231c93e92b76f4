"""Which kernels a model has run when it starts, in Triton's interpreter: later batches take no others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine_driver import tokens_of
from mambacache.config import SamplingParams
from mambacache.kernels import api, experts, gpu
from mambacache.kernels.gpu.common.launch import Launcher
from mambacache.models.adapt import load_model
from mambacache.runner.sampler import RowSampling
from runner_driver import Driver, Row

GREEDY = RowSampling(SamplingParams(temperature=0), (0,))


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[Launcher]:
    """All of them, and none has launched anything."""
    if torch.cuda.is_available():
        pytest.skip("the GPU itself runs them")
    found: list[Launcher] = []
    for ops in (api, experts):
        monkeypatch.setattr(ops, "backend", lambda _: gpu)
    for module in [module for name, module in sys.modules.items() if name.startswith(gpu.__name__)]:
        found += [each for each in vars(module).values() if isinstance(each, Launcher)]
    for launcher in found:
        monkeypatch.setattr(launcher, "variants", {})
    return found


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2"])
def test_prompts_take_no_other_kernels(name: str, tiny_model: Callable[[str], Path], launchers: list[Launcher]) -> None:
    driver = Driver(load_model(tiny_model(name), "float32", "cpu"))
    driver.runner.warm_up([[70], [1] * 4, [70] * 2], driver.block_size)
    warm = [set(launcher.variants) for launcher in launchers]
    assert any(warm)
    for lengths in ((5,), (66, 3), (2, 9, 3, 4, 7)):
        requests = [driver.add(tokens_of(length, length)) for length in lengths]
        driver.execute([Row(request, len(request.tokens)) for request in requests], [GREEDY] * len(lengths))
    assert [set(launcher.variants) for launcher in launchers] == warm
