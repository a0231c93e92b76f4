"""Check the logits that penalties, biases and bans of tokens leave, row by row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from mambacache.config import SamplingParams
from mambacache.plan import NOT_FINITE
from mambacache.runner.adjustments import Adjustment, Adjustments, Tally, adjustment_arrays
from mambacache.runner.sampler import draw_groups, draw_parameters, likeliest_tokens, sample

VOCABULARY = 40
PROMPT, ANSWER, ENDS = [3, 3, 5, 9], [5, 7, 7, 7, 11], (1, 7)

CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -1.5, "presence_penalty": -0.5},
    {"logit_bias": {3: 4.5, 7: -100, 39: 2}},
    {"min_tokens": 6},
    {"min_tokens": 5},
    {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.25, "logit_bias": {7: 3, 20: -1}},
    {"repetition_penalty": 1.1, "logit_bias": {1: 50, 5: 2}, "min_tokens": 9},
]


def sampled(logits: torch.Tensor, *how: Any) -> torch.Tensor:
    return sample(logits, likeliest_tokens(logits), *how)


def params_of(case: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, **case, **more})


def left(logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Return float32 logits [vocabulary] as vLLM leaves them: bans, biases, then repetition, frequency, presence."""
    logits = logits.clone()
    if len(answer) < params.min_tokens:
        logits[list(ENDS)] = -torch.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    seen = torch.tensor([[*prompt, *answer]])
    logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, logits[None])[0]
    for token, count in Counter(answer).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def on_device(adjusted: dict[int, Adjustment], drawn: Sequence[int]) -> Adjustments:
    return Adjustments(*map(torch.from_numpy, adjustment_arrays(adjusted, drawn).values()))


def adjustment_of(params: SamplingParams, answer: Sequence[int] = ANSWER) -> Adjustment:
    return Tally(params, PROMPT, ENDS).after(answer)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_after_adjustments(case: dict[str, Any], dtype: torch.dtype) -> None:
    """Compare how often evenly spread draws take each token."""
    params, strata = params_of(case, temperature=2.0), 1 << 12
    logits = (2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))).to(dtype)
    parameters = np.repeat(draw_parameters([params], [0], [0]), strata, axis=1)
    parameters[4] = np.arange(strata) << (31 - 12)
    every = torch.arange(strata)
    adjustments = on_device(dict.fromkeys(range(strata), adjustment_of(params)), range(strata))
    index = torch.zeros(strata, dtype=torch.int32)
    groups = draw_groups([params] * strata)
    tokens = sampled(logits[None], index, every, torch.from_numpy(parameters), groups, adjustments)
    expected = (left(logits.float(), params, PROMPT, ANSWER) / 2).softmax(-1)
    assert (tokens.bincount(minlength=VOCABULARY) / strata - expected).abs().max() < 2 / strata


def test_rows_of_all_kinds_together() -> None:
    """Each row is as it is alone. An adjustment changes no bit of other rows."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, VOCABULARY, generator=generator)
    rows = [params_of(CASES[i % 10] if i % 3 else {}, temperature=i % 2 * 1.5, seed=i) for i in range(30)]
    adjusted = {i: adjustment_of(params) for i, params in enumerate(rows) if params.adjusts(len(ANSWER))}
    drawn = [i for i, params in enumerate(rows) if params.temperature]
    assert 0 < len(adjusted) < 30 and set(adjusted) & set(drawn) and set(adjusted) - set(drawn)

    def tokens(samples: list[int]) -> list[int]:
        place = {i: at for at, i in enumerate(samples)}
        draws = [i for i in samples if i in drawn]
        changes = {place[i]: adjusted[i] for i in samples if i in adjusted}
        parameters = torch.from_numpy(draw_parameters([rows[i] for i in draws], draws, draws))
        spots = [place[i] for i in draws]
        before = logits.clone()
        index, draw_index = torch.tensor(samples, dtype=torch.int32), torch.tensor(spots, dtype=torch.int32)
        groups = draw_groups([rows[i] for i in draws])
        got = sampled(logits, index, draw_index, parameters, groups, on_device(changes, spots) if changes else None)
        assert torch.equal(logits, before)
        return got.tolist()

    together = tokens(list(range(30)))
    assert together == [tokens([i])[0] for i in range(30)]
    for i, params in enumerate(rows):
        if not params.temperature:
            assert together[i] == left(logits[i], params, PROMPT, ANSWER).argmax()


def test_adjusted_logits_that_are_not_finite_are_reported() -> None:
    logits = torch.full((1, VOCABULARY), torch.nan)
    changes = on_device({0: adjustment_of(params_of(CASES[0]))}, [])
    none = torch.from_numpy(draw_parameters([], [], []))
    index = torch.zeros(1, dtype=torch.int32)
    assert sampled(logits, index, index[:0], none, [], changes).tolist() == [NOT_FINITE]


@pytest.mark.parametrize(
    ("case", "num_answered", "asks"),
    [({}, 0, False), ({"min_tokens": 3}, 2, True), ({"min_tokens": 3}, 3, False), ({"logit_bias": {}}, 0, False)]
    + [(case, 0, True) for case in CASES],
)  # fmt: skip
def test_which_parameters_ask_for_adjustments(case: dict[str, Any], num_answered: int, asks: bool) -> None:
    assert params_of(case).adjusts(num_answered) == asks


def test_nothing_is_counted_twice() -> None:
    params = params_of(
        {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "logit_bias": {7: 1, 5: 2}, "min_tokens": 9}
    )
    change = adjustment_of(params)
    assert change.tokens.tolist() == [1, 3, 5, 7, 9, 11]
    assert change.bias.tolist() == [-math.inf, 0, 2, -math.inf, 0, 0]
    assert change.penalty.tolist() == [1, 2, 2, 2, 2, 2] and change.cost.tolist() == [0, 0, 1, 3, 0, 1]


@pytest.mark.parametrize("case", CASES)
def test_stepwise_adjustments_equal_adjustments_at_once(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are among the tokens. Earlier adjustments stay as they were."""
    params, rng = params_of(case), np.random.default_rng(2)
    answer = rng.integers(0, VOCABULARY, 60).tolist()
    tally, given, length = Tally(params, PROMPT, ENDS), [], 0
    expected = [adjustment_of(params, answer[:end]) for end in range(len(answer) + 1)]
    monkeypatch.setattr(np, "unique", None)  # a step sorts nothing
    while length + 4 < len(answer):
        given += enumerate(tally.after(answer[:length], answer[length : length + 4]), length)
        length += int(rng.integers(1, 5))
    monkeypatch.undo()
    for end, found in given:
        for name, array in expected[end]._asdict().items():
            np.testing.assert_array_equal(getattr(found, name), array, err_msg=f"{name} after {end}")
