"""Kernels are compiled for the strides of a layer's activations: no batch may change these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_driver import MODELS, tokens_of
from mambacache.config import SamplingParams
from mambacache.kernels import reference
from mambacache.models.adapt import load_model
from mambacache.runner.sampler import RowSampling
from runner_driver import Driver, Row
from selection import by_family

GREEDY = RowSampling(SamplingParams(temperature=0), (0,))
OPS = ("conv1d", "gated_delta_rule", "kda", "selective_scan", "ssd")
"""The other ops take strides with every launch."""

Strides = dict[tuple[object, ...], set[tuple[int, ...]]]


def note(op: str, call: Callable[..., Any], found: Strides) -> Callable[..., Any]:
    """Note the strides of tensors by op, argument and shape of a row. (A lone token may have any strides.)"""

    def noted(*args: Any, **options: Any) -> Any:
        for name, each in [*enumerate(args), *options.items()]:
            if isinstance(each, torch.Tensor) and len(each) > 1:
                found[op, name, *each.shape[1:]].add(each.stride())
        return call(*args, **options)

    return noted


@pytest.mark.parametrize("name", by_family(MODELS))
def test_strides_depend_on_the_layer_alone(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Strides = defaultdict(set)
    for op in OPS:
        monkeypatch.setattr(reference, op, note(op, getattr(reference, op), found))
    driver = Driver(load_model(tiny_model(name), "float32", "cpu"))
    for lengths in ((2, 3), (70, 5), (131,)):
        requests = [driver.add(tokens_of(length, length)) for length in lengths]
        for request, length in zip(requests, lengths, strict=True):
            request.tokens += driver.execute([Row(request, length)], [GREEDY])[0].tokens
        driver.execute([Row(request, drafts=()) for request in requests], [GREEDY] * len(requests))
    assert found and {key: strides for key, strides in found.items() if len(strides) > 1} == {}
