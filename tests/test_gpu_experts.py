"""Check the ops of a mixture of experts on a GPU, on shapes of real models, and the launches of a whole mixture."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward

from gpu_cases import BF16, FP16, FP32, Dtypes
from kernel_cases import assert_bitwise, random
from mambacache.kernels import combine_experts, group_by_expert, reference, silu_and_mul
from mambacache.models import experts
from test_gpu_launches import launched
from test_kernels_experts import (
    CHOSEN,
    check_choice,
    check_choices_among_non_finite_logits,
    check_combine,
    check_silu_and_mul,
    routing,
)
from test_models_experts import experts_module, layer_input, qwen_block

pytestmark = pytest.mark.gpu

QWEN3_NEXT = {"num_experts": 512, "hidden": 2048, "width": 512, "device": "cuda"}
CHOICES = 10  # experts of each token
LAUNCHES = 14  # at most; a product by expert takes two


def check_grouping(tokens: int, choices: int, num_experts: int, chosen: str = "any") -> None:
    ids = routing(tokens, choices, num_experts, chosen, "cuda")
    first = group_by_expert(ids, num_experts)
    for expected in (reference.group_by_expert(ids, num_experts), group_by_expert(ids, num_experts)):
        for x, y in zip(first, expected, strict=True):
            assert_bitwise(x, y)


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize(
    ("tokens", "choices", "num_experts"),
    [
        (1, 1, 2),
        (1, 10, 512),
        (64, 10, 512),
        (2048, 2, 8),
        (2049, 2, 8),
        (410, 10, 60),
        (8192, 10, 512),
        (16384, 8, 128),
    ],
)
def test_slots_are_sorted_by_expert(tokens: int, choices: int, num_experts: int, chosen: str) -> None:
    check_grouping(tokens, choices, num_experts, chosen)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("width", "gap"), [(512, 0), (1408, 8), (1792, 0), (100, 3)])
@pytest.mark.parametrize("rows", [1, 640, 20000])
def test_silu_and_mul(rows: int, width: int, gap: int, dtype: torch.dtype) -> None:
    check_silu_and_mul(rows, width, gap, dtype, "cuda")
    if dtype != FP32:
        x = (3 * random(rows, 2 * width, seed=4)).to("cuda", dtype)
        gate, up = x.chunk(2, dim=-1)
        assert_bitwise(silu_and_mul(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)], ids=str)
@pytest.mark.parametrize(("width", "gap"), [(2048, 0), (2304, 8), (100, 3)])
@pytest.mark.parametrize("batch", [(1, 1), (65, 2), (640, 8), (3000, 10)], ids=str)
def test_combine(batch: tuple[int, int], width: int, gap: int, dtypes: Dtypes) -> None:
    check_combine(batch, width, gap, dtypes, "cuda")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("choices", "num_experts"), [(10, 512), (8, 8), (8, 256)])
def test_the_likeliest_are_chosen(choices: int, num_experts: int, dtype: torch.dtype, normalize: bool) -> None:
    for tokens in (1, 64, 5000):
        check_choice(tokens, choices, num_experts, dtype, normalize, "cuda")


@pytest.mark.parametrize("normalize", [True, False])
def test_choices_among_non_finite_logits_are_experts(normalize: bool) -> None:
    check_choices_among_non_finite_logits(normalize, "cuda")


@pytest.mark.parametrize("tokens", [7, 64, 2500])
def test_a_gated_mixture_equals_transformers(tokens: int) -> None:
    """The router's product is wider, and may round otherwise: near ties choose other experts."""
    block, x = qwen_block(BF16, device="cuda"), random(1, tokens, 2048, seed=1, dtype=BF16).cuda()
    expected, theirs = block(x), launched(partial(block, x))
    mixture = experts.MIXTURES["Qwen3NextSparseMoeBlock"](block)
    mixture.experts.config._experts_implementation = experts.EXPERTS
    y, names = mixture(x), launched(partial(mixture, x))
    scale = expected.float().pow(2).mean(-1).sqrt()
    errors = (y - expected).float().pow(2).mean(-1).sqrt() / scale
    assert errors.median() < 0.01 and errors.max() < 1
    assert len(names) + 15 <= len(theirs), names


def test_no_tokens() -> None:
    tokens, places, offsets = group_by_expert(torch.empty(0, 2, dtype=torch.int64, device="cuda"), 4)
    assert tokens.shape == (0,) and places.shape == (0, 2) and offsets.tolist() == [0] * 4
    rows = silu_and_mul(torch.empty(0, 32, device="cuda"))
    assert combine_experts(rows, torch.empty(0, 2, device="cuda"), places).shape == (0, 16)


@pytest.mark.xdist_group("memory")
def test_rows_beyond_two_billion_elements() -> None:
    x = random(64, 4096, seed=1, dtype=BF16).cuda()
    repeats = (2**31 + 2**25) // x.numel()
    many = x.repeat(repeats, 1)
    assert_bitwise(silu_and_mul(many)[-64:], silu_and_mul(x))
    places = torch.arange(64, dtype=torch.int32, device="cuda").view(32, 2)
    weights = random(32, 2, seed=2).sigmoid().to("cuda", BF16)
    alone = combine_experts(x, weights, places)
    assert_bitwise(combine_experts(many, weights, places + len(many) - 64), alone)


def on_gpu(tokens: int, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    x, ids, weights = layer_input(tokens, choices, 512, 2048, BF16, BF16)
    return x.cuda(), ids.cuda(), weights.cuda()


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("tokens", [1, 64, 2500])
@pytest.mark.parametrize("choices", [2, CHOICES])
def test_a_mixture_equals_transformers(choices: int, tokens: int, gate: bool) -> None:
    """Up to four terms are added in the same order."""
    module, inputs = experts_module(BF16, gate=gate, **QWEN3_NEXT), on_gpu(tokens, choices)
    y, expected = module(*inputs), grouped_mm_experts_forward(module, *inputs)
    assert_bitwise(module(*inputs), y)
    if choices <= 4:
        assert_bitwise(y, expected)
    else:
        assert (y != expected).float().mean() < 0.01
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("tokens", [1, 64, 500])
def test_in_a_cuda_graph(tokens: int) -> None:
    module, (x, ids, weights) = experts_module(BF16, **QWEN3_NEXT), on_gpu(tokens, CHOICES)
    other = (x.flip(0) * 2, ids.flip(0).roll(1, 1), weights.flip(0))
    expected = module(*other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x, ids, weights)
    for place, value in zip((x, ids, weights), other, strict=True):
        place.copy_(value)
    graph.replay()
    assert_bitwise(y, expected)


@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_launches_of_a_layer(tokens: int) -> None:
    module, inputs = experts_module(BF16, **QWEN3_NEXT), on_gpu(tokens, CHOICES)
    names = launched(partial(module, *inputs))
    assert len(names) <= LAUNCHES, names
    assert len(names) < len(launched(partial(grouped_mm_experts_forward, module, *inputs)))
