"""Check RMSNorm on a GPU, on shapes of real models."""

from __future__ import annotations

import pytest
import torch

import test_kernels_rms_norm as norm
from gpu_cases import BF16, FP16, FP32
from kernel_cases import assert_bitwise, random
from mambacache.kernels import rms_norm
from test_kernels_out import GAPS
from test_kernels_out import test_rms_norm_writes_its_result_into_out as check_into_out

pytestmark = pytest.mark.gpu

WIDTHS = [16, 160, 256, 2048, 16384, 35000]
# dtypes of x and weight, and whether the normalised value is rounded
KINDS = {
    "llama": (BF16, BF16, True),
    "llama-fp16": (FP16, FP16, True),
    "llama-fp32-residual": (FP32, BF16, True),
    "qwen3-next": (BF16, FP32, False),
    "nemotron-h": (BF16, BF16, False),
    "fp32": (FP32, FP32, False),
    "weightless": (BF16, None, False),
}


@pytest.mark.parametrize("view", norm.VIEWS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("dtype", "weight_dtype", "round_normed"), KINDS.values(), ids=KINDS.keys())
def test_accuracy(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, round_normed: bool, width: int, view: str
) -> None:
    x = norm.norm_input(view, 333 if width < 10000 else 33, width, dtype, "cuda")
    norm.check_against_the_reference(x, norm.norm_weight(width, weight_dtype, "cuda"), round_normed)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", ["dense", "split", "heads"])
def test_a_token_does_not_depend_on_its_batch(view: str, width: int, dtype: torch.dtype) -> None:
    norm.test_a_token_does_not_depend_on_its_batch(view, width, dtype, "cuda")


def test_no_tokens() -> None:
    empty = torch.empty(1, 0, 32, device="cuda")
    assert rms_norm(empty, torch.ones(32, device="cuda"), 1e-6, round_normed=True).shape == empty.shape


@pytest.mark.xdist_group("memory")
def test_rows_beyond_two_billion_elements() -> None:
    x = random(1, 64, 4096, seed=1, dtype=BF16).cuda()
    weight = torch.ones(4096, device="cuda", dtype=BF16)
    repeats = (2**31 + 2**25) // x.numel()
    y = rms_norm(x.repeat(1, repeats, 1), weight, 1e-6, round_normed=True)
    assert_bitwise(y[:, -64:], rms_norm(x, weight, 1e-6, round_normed=True))


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("shape", [(33, 2048), (33, 16, 256), (5, 2, 3, 48)])
def test_into_out(shape: tuple[int, ...], gap: int) -> None:
    check_into_out(shape, True, gap, device="cuda")
