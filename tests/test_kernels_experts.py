"""Check the ops around the products of a mixture of experts, in plain torch and in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import assert_bitwise, random
from mambacache.kernels import choose_experts, combine_experts, group_by_expert, reference, silu_and_mul
from mambacache.kernels.gpu import experts as gpu_experts

FP16, FP32 = torch.float16, torch.float32
# tokens, choices of each, experts
BATCHES = [(1, 1, 2), (2, 2, 8), (63, 8, 60), (64, 1, 128), (65, 2, 2), (300, 2, 128), (1, 8, 512)]
CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda ids: ids,
    "one": lambda ids: torch.full_like(ids, 1),
    "even": lambda ids: ids // 2 * 2,
}


def routing(tokens: int, choices: int, num_experts: int, chosen: str = "any", device: str = "cpu") -> Tensor:
    ids = torch.randint(num_experts, (tokens, choices), generator=torch.Generator().manual_seed(tokens))
    return CHOSEN[chosen](ids).to(device)


def check_grouping(ids: Tensor, num_experts: int) -> None:
    chosen = ids.flatten().tolist()
    order = sorted(range(len(chosen)), key=lambda slot: (chosen[slot], slot))
    tokens, places, offsets = group_by_expert(ids, num_experts)
    assert tokens.dtype == places.dtype == offsets.dtype == torch.int32 and places.shape == ids.shape
    assert tokens.tolist() == [slot // ids.shape[1] for slot in order]
    assert [order[place] for place in places.flatten().tolist()] == [*range(len(chosen))]
    ends = torch.bincount(ids.flatten().cpu(), minlength=num_experts).cumsum(0)
    assert offsets.tolist() == ends.tolist()


def check_choice(
    tokens: int, choices: int, num_experts: int, dtype: torch.dtype, normalize: bool, device: str = "cpu"
) -> None:
    """Check against float64 that experts come in falling order, and that no expert left out is likelier."""
    gap = 3
    wide = (3 * random(tokens, gap + num_experts, seed=tokens)).to(device, dtype)
    logits = wide[:, gap:]
    weights, experts = choose_experts(logits, choices, normalize=normalize)
    assert weights.dtype == dtype and experts.dtype == torch.int64 and experts.shape == (tokens, choices)
    chosen = logits.double().gather(1, experts)
    assert (chosen.diff(dim=1) <= 0).all()
    assert all(len(set(row)) == choices for row in experts.tolist())
    best = logits.double().topk(choices).values
    torch.testing.assert_close(chosen, best, rtol=0, atol=0)
    exact = logits.double().softmax(-1).gather(1, experts)
    exact = exact / exact.sum(-1, keepdim=True) if normalize else exact
    torch.testing.assert_close(weights.double(), exact, rtol=1.01 * torch.finfo(dtype).eps + 2e-6, atol=1e-7)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(("tokens", "choices", "num_experts"), [*BATCHES, (3, 8, 8), (5, 10, 512), (70, 4, 32)])
def test_the_likeliest_are_chosen(
    backend: str, tokens: int, choices: int, num_experts: int, dtype: torch.dtype, normalize: bool
) -> None:
    check_choice(tokens, choices, num_experts, dtype, normalize)


def check_choices_among_non_finite_logits(normalize: bool, device: str = "cpu") -> None:
    logits = torch.zeros(4, 12, device=device)
    logits[1], logits[2, 3], logits[3, 5] = torch.nan, torch.inf, -torch.inf
    weights, experts = choose_experts(logits, 5, normalize=normalize)
    assert ((experts >= 0) & (experts < 12)).all() and all(len(set(row)) == 5 for row in experts.tolist())
    assert weights[1:3].isnan().all() and weights[[0, 3]].isfinite().all()


@pytest.mark.parametrize("normalize", [True, False])
def test_choices_among_non_finite_logits_are_experts(backend: str, normalize: bool) -> None:
    """A choice among NaN is an expert all the same: another index would write where nothing may."""
    check_choices_among_non_finite_logits(normalize)


@pytest.mark.parametrize("ranked", [gpu_experts.RANKED_SLOTS, 0])
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize(("tokens", "choices", "num_experts"), BATCHES)
def test_slots_are_sorted_by_expert(
    backend: str,
    tokens: int,
    choices: int,
    num_experts: int,
    chosen: str,
    ranked: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_experts, "RANKED_SLOTS", ranked)
    check_grouping(routing(tokens, choices, num_experts, chosen), num_experts)


def test_many_slots(backend: str) -> None:
    check_grouping(routing(513, 8, 60), 60)


def test_choices_of_any_layout(backend: str) -> None:
    check_grouping(routing(5, 40, 8).T, 8)


def check_silu_and_mul(rows: int, width: int, gap: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """In 16 bits few results differ: by one rounding of SiLU's last bit, and one of the product."""
    x = (3 * random(rows, gap + 2 * width, seed=1)).to(device, dtype)[:, gap:]
    actual, expected = silu_and_mul(x), reference.silu_and_mul(x)
    assert actual.dtype == dtype and actual.shape == (rows, width)
    if dtype != FP32:
        assert (actual != expected).float().mean() < 0.01
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * ulp, atol=4 * torch.finfo(dtype).tiny)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(("rows", "width", "gap"), [(1, 512, 0), (63, 24, 0), (64, 24, 8), (300, 7, 3), (3, 1408, 1)])
def test_silu_and_mul(backend: str, rows: int, width: int, gap: int, dtype: torch.dtype) -> None:
    check_silu_and_mul(rows, width, gap, dtype)


def check_combine(
    batch: tuple[int, int], width: int, gap: int, dtypes: tuple[torch.dtype, torch.dtype], device: str = "cpu"
) -> None:
    tokens, choices = batch
    order = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(1))
    rows = random(tokens * choices, gap + width, seed=2, dtype=dtypes[0]).to(device)[:, gap:]
    weights = random(tokens, choices, seed=3).sigmoid().to(device, dtypes[1])
    places = order.view(tokens, choices).int().to(device)
    assert_bitwise(combine_experts(rows, weights, places), reference.combine_experts(rows, weights, places))
    # A sigmoid may be rounded otherwise.
    wide = random(tokens, gap + width + 1, seed=4).to(device, dtypes[0])
    shared, gate = wide[:, gap:-1], 3 * wide[:, -1]
    actual, expected = (op(rows, weights, places, shared, gate) for op in (combine_experts, reference.combine_experts))
    ulp = torch.finfo(dtypes[0]).eps
    assert (actual != expected).float().mean() < (0.1 if dtypes[0] == FP32 else 0.01)
    torch.testing.assert_close(actual, expected, rtol=2 * ulp, atol=4 * ulp)


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP16, FP16), (FP16, FP32)], ids=str)
@pytest.mark.parametrize(
    ("batch", "width", "gap"), [((1, 1), 2048, 0), ((63, 2), 24, 8), ((65, 8), 100, 3), ((300, 2), 64, 0)]
)
def test_combine(
    backend: str, batch: tuple[int, int], width: int, gap: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    check_combine(batch, width, gap, dtypes)


FITTING = torch.zeros(4, 8), torch.zeros(2, 2), torch.zeros(2, 2).int()


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (group_by_expert, (torch.zeros(4, dtype=torch.int64), 2), "experts has shape"),
        (group_by_expert, (torch.zeros(4, 2), 2), "experts is float32 where int64 is needed"),
        (silu_and_mul, (torch.zeros(4, 7),), r"x has shape \[4, 7\] where the other arguments need \[4, 6\]"),
        (silu_and_mul, (torch.zeros(4, 6, dtype=torch.int32),), "x is int32"),
        (combine_experts, (torch.zeros(4, 8), torch.zeros(2, 3), torch.zeros(2, 2).int()), "weights has shape"),
        (combine_experts, (torch.zeros(4, 8), torch.zeros(2, 2), torch.zeros(2, 2).long()), "places is int64"),
        (combine_experts, (torch.zeros(4, 8), torch.zeros(2, 2).half(), torch.zeros(2, 2).int()), "weights is float16"),
        (choose_experts, (torch.zeros(4),), r"logits has shape"),
        (choose_experts, (torch.zeros(4, 2).long(),), "logits is int64"),
        (choose_experts, (torch.zeros(4, 2),), "choices is 3, but it must be 1 to 2"),
        (combine_experts, (*FITTING, torch.zeros(2, 7), torch.zeros(2)), "shared has shape"),
        (combine_experts, (*FITTING, torch.zeros(2, 8), torch.zeros(2, 1)), "gate has shape"),
        (combine_experts, (*FITTING, torch.zeros(2, 8).half(), torch.zeros(2)), "shared is float16"),
        (combine_experts, (*FITTING, torch.zeros(2, 8)), "belong together"),
        (combine_experts, (*FITTING, torch.zeros(2, 8), torch.zeros(2, device="meta")), "shared, gate are on"),
        (
            combine_experts,
            (torch.zeros(4, 8), torch.zeros(2, 2, device="meta"), torch.zeros(2, 2).int()),
            "are on cpu, meta, cpu: move them to one",
        ),
    ],
)
def test_errors(op: Callable[..., Any], arguments: tuple[Any, ...], message: str) -> None:
    options = {"choices": 3, "normalize": True} if op is choose_experts else {}
    with pytest.raises(ValueError, match=message):
        op(*arguments, **options)
