"""Check RMSNorm against its formula in float64, its roundings, and the arguments that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import assert_bitwise, random
from mambacache.kernels import reference, rms_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Make = Callable[..., Tensor]  # from a shape

# Views of [tokens, width] or more dims: from linears, from a split, and heads beside their gates or other heads.
VIEWS: dict[str, Callable[[Make, int, int], Tensor]] = {
    "dense": lambda make, tokens, width: make(1, tokens, width),
    "split": lambda make, tokens, width: make(tokens, width + 7)[:, 3 : 3 + width],
    "chunk": lambda make, tokens, width: make(1, tokens, 3, 2 * width).chunk(2, dim=-1)[1],
    "heads": lambda make, tokens, width: make(1, tokens, 5, width)[:, :, :3],
    "more dims": lambda make, tokens, width: make(tokens, 2, 3, width),
    "vector": lambda make, tokens, width: make(width),
}
WEIGHTS = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "none": None}


def norm_input(view: str, tokens: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    return VIEWS[view](lambda *shape: random(*shape, seed=1, dtype=dtype).to(device), tokens, width)


def norm_weight(width: int, dtype: torch.dtype | None, device: str = "cpu") -> Tensor | None:
    return None if dtype is None else (1 + 0.3 * random(width, seed=2)).to(device, dtype)


def check_against_the_reference(x: Tensor, weight: Tensor | None, round_normed: bool) -> None:
    """In 16 bits almost every output is the same to the last bit. Another rounding point would change many.

    The normalised value and its product are rounded: the few other outputs are two units off at most.
    """
    y = rms_norm(x, weight, 1e-5, round_normed=round_normed)
    expected = reference.rms_norm(x, weight, 1e-5, round_normed=round_normed)
    assert y.dtype == expected.dtype and y.shape == x.shape
    if x.dtype == FP32:
        torch.testing.assert_close(y, expected, atol=2e-6, rtol=2e-6)
    else:
        assert (y != expected).float().mean() < 0.01
        ulp = torch.finfo(x.dtype).eps
        torch.testing.assert_close(y.to(x.dtype), expected.to(x.dtype), rtol=2 * ulp, atol=ulp)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("round_normed", [True, False])
@pytest.mark.parametrize("weight_dtype", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
def test_is_its_formula(dtype: torch.dtype, weight_dtype: torch.dtype | None, round_normed: bool, view: str) -> None:
    x, weight = norm_input(view, 21, 48, dtype), norm_weight(48, weight_dtype)
    y = rms_norm(x, weight, 1e-5, round_normed=round_normed)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 if weight is None else weight.double())
    assert y.dtype == (torch.promote_types(dtype, weight_dtype or dtype) if round_normed else dtype)
    bound = {FP32: 1e-6, BF16: 2**-7, torch.float64: 1e-13}[dtype]
    torch.testing.assert_close(y.double(), exact, atol=bound, rtol=bound)


def test_round_normed_chooses_the_rounding_points() -> None:
    x, weight = random(50, 64, seed=1, dtype=BF16), norm_weight(64, BF16)
    assert weight is not None
    rounded = rms_norm(x, None, 1e-5, round_normed=False)
    assert_bitwise(rms_norm(x, weight, 1e-5, round_normed=True), weight * rounded)
    once = rms_norm(x.float(), weight.float(), 1e-5, round_normed=False).to(BF16)
    assert_bitwise(rms_norm(x, weight, 1e-5, round_normed=False), once)
    assert not torch.equal(once, weight * rounded)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("width", [16, 2048])
@pytest.mark.parametrize("view", ["dense", "split", "heads"])
def test_a_token_does_not_depend_on_its_batch(
    view: str, width: int, dtype: torch.dtype, device: str = "cpu", tokens: int = 700
) -> None:
    x, weight = norm_input(view, tokens, width, dtype, device), norm_weight(width, FP32, device)
    axis = 0 if view == "split" else 1
    whole = rms_norm(x, weight, 1e-6, round_normed=False)
    for start, stop in ((0, 1), (3, 4), (5, tokens), (tokens // 5, tokens // 3)):
        part = x.narrow(axis, start, stop - start)
        alone = rms_norm(part, weight, 1e-6, round_normed=False)
        assert_bitwise(alone, whole.narrow(axis, start, stop - start))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(8)}, r"weight has shape \[8\]"),
        ({"x": torch.zeros(4, 16, dtype=torch.int32)}, "x is int32"),
        ({"weight": torch.zeros(16, device="meta")}, "x is on cpu and weight on meta: move them to one"),
        ({"out": torch.zeros(4, 16, dtype=BF16)}, "out is bfloat16 where float32 is needed"),
        ({"x": torch.zeros(4, 16, dtype=BF16), "out": torch.zeros(4, 16, dtype=BF16)}, "where float32 is needed"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.zeros(4, 16), "weight": torch.ones(16), "eps": 1e-6, "round_normed": True} | change
    with pytest.raises(ValueError, match=message):
        rms_norm(**arguments)
