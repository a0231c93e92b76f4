"""Our RMSNorm gives the bits of the modules of transformers that it replaces."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from kernel_cases import assert_bitwise, random
from mambacache.models.adapt import MODEL_TYPES, model_skeleton
from mambacache.models.norm import NORMS, RMSNorm
from selection import by_family
from tiny_models import TINY_MODELS

DIM = 96
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def original(name: str, weight_dtype: torch.dtype) -> nn.Module:
    """Return a norm of transformers with random weights."""
    for model_type in MODEL_TYPES:
        folder = model_type.removesuffix("_text")
        if found := getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), name, None):
            module: Any = found(DIM, eps=1e-5).to(weight_dtype).requires_grad_(False)
            if isinstance(module.weight, nn.Parameter):
                module.weight.add_(0.3 * random(DIM, seed=1, dtype=weight_dtype))
            return module
    raise AssertionError(f"transformers has no {name}")


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16), (BF16, FP32)], ids=str
)
@pytest.mark.parametrize("name", NORMS)
def test_equals_the_module(name: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    module = original(name, weight_dtype)
    x = 3 * random(1, 50, 2, 2 * DIM, seed=2, dtype=dtype).chunk(2, dim=-1)[1]
    expected, y = module(x), NORMS[name](module)(x)
    if name == "NemotronHRMSNorm" and transformers.__version__.startswith("5.17."):  # that version rounds once more
        torch.testing.assert_close(y, expected.to(dtype))
    else:
        assert y.dtype == expected.dtype
        assert_bitwise(y, expected)


@pytest.mark.parametrize("name", by_family(TINY_MODELS))
def test_every_norm_of_a_model_is_replaced(name: str, tiny_model: Callable[[str], Path]) -> None:
    module = model_skeleton(tiny_model(name), dtype="bfloat16").module
    norms = [child for child in module.modules() if "norm" in type(child).__name__.lower()]
    assert len(norms) >= module.config.num_hidden_layers
    assert {type(norm) for norm in norms} == {RMSNorm}
