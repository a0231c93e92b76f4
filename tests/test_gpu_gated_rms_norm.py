"""Check the gated norm on a GPU, on shapes of real models."""

from __future__ import annotations

import pytest
import torch

import test_kernels_gated_rms_norm as norm
from gpu_cases import BF16, FP16, FP32, NORM_OPTIONS, Dtypes, norm_errors
from kernel_cases import assert_bitwise, random
from mambacache.kernels import gated_rms_norm
from test_kernels_out import GAPS
from test_kernels_out import test_gated_rms_norm_writes_its_result_into_out as check_into_out

pytestmark = pytest.mark.gpu

SHAPES = {
    "qwen3-next": (32, 128, None),
    "olmo-hybrid": (30, 192, None),
    "nemotron-h": (1, 8192, 1024),
    "granite-4": (1, 8192, None),
    "narrow": (5, 24, None),
    "widest tile": (1, 16384, None),
    "many tiles": (1, 70000, 35000),
}


@pytest.mark.parametrize("options", NORM_OPTIONS.values(), ids=NORM_OPTIONS.keys())
@pytest.mark.parametrize(("heads", "dim", "group_size"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)], ids=str)
def test_accuracy(options: dict, heads: int, dim: int, group_size: int | None, dtypes: Dtypes) -> None:
    error, ruler = norm_errors(333, heads, dim, *dtypes, group_size=group_size, **options)
    assert error <= 1.1 * ruler + 1e-7


@pytest.mark.parametrize(("heads", "dim", "group_size"), SHAPES.values(), ids=SHAPES.keys())
def test_a_token_does_not_depend_on_its_batch_or_strides(heads: int, dim: int, group_size: int | None) -> None:
    wide = random(700, 2 * heads * dim, seed=4, dtype=BF16).cuda()
    x, gate = (part.unflatten(1, (heads, dim)) for part in wide.split(heads * dim, dim=1))
    weight = random(dim, seed=5, dtype=BF16).cuda()
    whole = gated_rms_norm(x, gate, weight, 1e-6, group_size=group_size)
    for start, stop in ((0, 1), (3, 4), (5, 700), (130, 197)):
        alone = gated_rms_norm(x[start:stop].clone(), gate[start:stop].clone(), weight, 1e-6, group_size=group_size)
        assert_bitwise(whole[start:stop], alone)


def test_no_tokens() -> None:
    empty = torch.empty(0, 4, 32, device="cuda")
    assert gated_rms_norm(empty, empty, torch.ones(32, device="cuda"), 1e-6).shape == empty.shape


def test_a_vector_counts_as_a_token() -> None:
    norm.test_a_vector_counts_as_a_token("cuda")


@pytest.mark.xdist_group("memory")
def test_rows_beyond_two_billion_elements() -> None:
    x, gate = (random(64, 4096, seed=i, dtype=BF16).cuda() for i in (1, 2))
    weight = torch.ones(4096, device="cuda", dtype=BF16)
    repeats = (2**31 + 2**25) // x.numel()
    y = gated_rms_norm(x.repeat(repeats, 1), gate.repeat(repeats, 1), weight, 1e-6)
    assert_bitwise(y[-64:], gated_rms_norm(x, gate, weight, 1e-6))


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(("heads", "dim", "group_size"), SHAPES.values(), ids=SHAPES.keys())
def test_into_out(heads: int, dim: int, group_size: int | None, gap: int) -> None:
    check_into_out((33, heads, dim), group_size, BF16, gap, device="cuda")
