"""Check the distributions of samples, and the values that a draw depends on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mambacache.config import SamplingParams
from mambacache.plan import NOT_FINITE
from mambacache.runner.sampler import (
    DRAW_BITS,
    _most_likely,
    draw_groups,
    draw_parameters,
    likeliest_tokens,
    ordered,
    random_bits,
    sample,
    score,
)

STRATA = 1 << 14


def sampled(logits: torch.Tensor, *how: Any) -> torch.Tensor:
    return sample(logits, likeliest_tokens(logits), *how)


def frequencies(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return how often each token is drawn for evenly spread random numbers: its probability within 1 / STRATA."""
    parameters = np.repeat(draw_parameters([params], [0], [0]), STRATA, axis=1)
    parameters[4] = np.arange(STRATA) << (DRAW_BITS - STRATA.bit_length() + 1)
    draws = torch.arange(STRATA), torch.from_numpy(parameters), [(STRATA, ordered(params))]
    tokens = sampled(logits[None], torch.zeros(STRATA, dtype=torch.int32), *draws)
    return tokens.bincount(minlength=len(logits)) / STRATA


def expected(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone()).softmax(-1)[0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=5.0),
        SamplingParams(top_k=1),
        SamplingParams(top_k=5),
        SamplingParams(top_k=1000),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=1e-6),
        SamplingParams(min_p=0.2),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1.7, top_k=20, top_p=0.8, min_p=0.1),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_distribution(params: SamplingParams, seed: int) -> None:
    logits = 2 * torch.randn(50, generator=torch.Generator().manual_seed(seed))
    got, want = frequencies(logits, params), expected(logits, params)
    assert (got - want).abs().max() < 2 / STRATA
    assert torch.all(got[want == 0] == 0)


def test_extreme_temperatures_and_logits() -> None:
    logits = torch.tensor([0.0, 30000.0, 29999.0, -torch.inf])
    assert frequencies(logits, SamplingParams(temperature=1e-30)).tolist() == [0, 1, 0, 0]
    assert frequencies(logits, SamplingParams(temperature=1e-60)).tolist() == [0, 1, 0, 0]
    assert (frequencies(logits, SamplingParams(temperature=1e9))[:3] - 1 / 3).abs().max() < 1e-3


def test_greedy_rows_beside_drawn_rows() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([0, 2, 2, 3, 5])
    params = SamplingParams(temperature=3.0)
    parameters = torch.from_numpy(draw_parameters([params] * 2, [7, 7], [10, 11]))
    tokens = sampled(logits, index, torch.tensor([1, 4]), parameters, draw_groups([params] * 2)).tolist()
    greedy = logits.argmax(-1)[index].tolist()
    assert [tokens[i] for i in (0, 2, 3)] == [greedy[i] for i in (0, 2, 3)]
    alone = sampled(logits[2:3], index[:1], torch.tensor([0]), parameters[:, :1], draw_groups([params]))
    assert tokens[1] == alone.item() != greedy[1]
    empty, none = torch.tensor([], dtype=torch.int32), torch.from_numpy(draw_parameters([], [], []))
    assert sampled(logits, index, empty, none, []).tolist() == greedy
    assert (
        sampled(logits, empty, empty, none, []).tolist() == sampled(logits[:0], empty, empty, none, []).tolist() == []
    )


def test_a_draw_depends_on_its_row_alone() -> None:
    """Check equal logits too, as in bf16, and rows with a cut, which are drawn otherwise than rows without."""
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    cuts = ({}, {"top_k": 10}, {"top_k": 200, "top_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.3}, {"top_k": 2000})
    params = [SamplingParams(temperature=2.0, **cuts[i % 6]) for i in range(64)]
    parameters = torch.from_numpy(draw_parameters(params, [i // 4 for i in range(64)], range(100, 164)))
    together = sampled(logits, torch.arange(64), torch.arange(64), parameters, draw_groups(params))
    order = sorted(range(64), key=lambda i: ordered(params[i]))
    grouped, groups = torch.tensor(order), draw_groups([params[i] for i in order])
    assert len(groups) == 3
    assert torch.equal(sampled(logits, torch.arange(64), grouped, parameters[:, grouped], groups), together)
    zero = torch.arange(1)
    alone = [
        sampled(logits[i : i + 1], zero, zero, parameters[:, i : i + 1], draw_groups(params[i : i + 1])).item()
        for i in range(64)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) > 50


@pytest.mark.parametrize("count", [1, 5, 1000])
def test_the_most_likely_tokens_equal_a_sort(count: int) -> None:
    logits = torch.randn(20, 1500, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    logits[:, ::7], logits[:, 1::7], logits[:, 2::7], logits[:, 3::7] = 0.0, -0.0, -torch.inf, 2.0
    assert torch.equal(
        _most_likely(logits, count), logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    )


@pytest.mark.parametrize(
    ("params", "sorts"),
    [
        (SamplingParams(), False),
        (SamplingParams(top_k=-1, min_p=0.1), False),
        (SamplingParams(top_k=20, top_p=0.8, min_p=0.1), False),
        (SamplingParams(top_p=0.9), True),
        (SamplingParams(top_k=2000), True),
    ],
)
def test_the_vocabulary_is_sorted_only_where_it_must_be(
    params: SamplingParams, sorts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, sort = [], torch.Tensor.sort
    monkeypatch.setattr(torch.Tensor, "sort", lambda x, **options: seen.append(x.shape) or sort(x, **options))
    parameters = torch.from_numpy(draw_parameters([params], [0], [0]))
    sampled(torch.randn(1, 3000), torch.arange(1), torch.arange(1), parameters, draw_groups([params]))
    assert bool(seen) == sorts


def test_random_bits() -> None:
    # The generator's first number from state 0 is 0xE220A8397B1DCDAF. One more round follows.
    state = (0xE220A8397B1DCDAF + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    state ^= state >> 31
    assert random_bits([0], [0]).tolist() == [state >> 33]
    bits = random_bits([1, 1, 2, -5, 2**70 + 3], [1, 2, 1, 0, 9])
    assert bits.dtype == np.int32 and len(set(bits.tolist())) == 5 and bits.min() >= 0
    grid = random_bits([seed for seed in range(100) for _ in range(100)], list(range(100)) * 100) / 2**DRAW_BITS
    assert np.histogram(grid, bins=10, range=(0, 1))[0].tolist() == pytest.approx([1000] * 10, abs=120)
    assert abs(np.corrcoef(grid[:-1], grid[1:])[0, 1]) < 0.04


def test_score() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, -torch.inf]])
    logprob, tokens, values = score(logits, torch.tensor([0, 1]), 2)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(logprob.double(), exact[[0, 1], [0, 1]], rtol=0, atol=1e-6)
    assert tokens[0].tolist() == [1, 2] and set(tokens[1].tolist()) == {0, 1}
    torch.testing.assert_close(values[0].double(), exact[0, [1, 2]], rtol=0, atol=1e-6)
    assert score(logits, torch.tensor([0, 1]), 10)[1].shape == (2, 3)


def test_logits_that_are_not_finite_are_reported() -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[nan] * 4, [-inf] * 4, [0, nan, 5, 1], [0, inf, 5, 1], [-inf, 0, -inf, -inf]])
    for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.9)):
        parameters = torch.from_numpy(draw_parameters([params] * 5, [0] * 5, range(5)))
        tokens = sampled(logits, torch.arange(5).repeat(2), torch.arange(5), parameters, draw_groups([params] * 5))
        assert tokens.tolist() == [*[NOT_FINITE] * 4, 1] * 2
