"""Engines that draft from their own requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_driver import Engines, Original, answer, ask, greedy, tokens_of

REPEATED = tokens_of(1, 40) * 3
PROMPTS = [REPEATED, [*tokens_of(2, 90), *tokens_of(2, 30)], tokens_of(3, 5), [7] * 70]


@pytest.mark.parametrize("model", ["qwen3_next", "mamba2"])
def test_tokens_are_those_without_drafts(engine: Engines, original: Callable[[str], Original], model: str) -> None:
    llm = engine(model, speculative="ngram")
    assert llm.config.max_draft_tokens == 3
    outputs = ask(llm, PROMPTS, greedy(80))
    original(model).check_all(PROMPTS, outputs)
    for output in outputs:
        [completion] = output.outputs
        assert len(answer(output)) == 80
        assert 0 <= completion.num_accepted_tokens <= completion.num_draft_tokens
    assert sum(output.outputs[0].num_accepted_tokens for output in outputs) > 0, "greedy answers of tiny models repeat"


def test_as_many_steps_are_saved_as_drafts_were_right(engine: Engines) -> None:
    llm = engine(speculative="ngram", max_draft_tokens=5)
    llm.submit(REPEATED, greedy(60))
    steps = 0
    while not llm.idle:
        outputs, steps = llm.step(), steps + 1
    [completion] = outputs[0].outputs
    assert completion.num_accepted_tokens > 0
    assert steps == 60 - completion.num_accepted_tokens


def test_of_two_sources_one_is_refused(engine: Engines) -> None:
    with pytest.raises(ValueError, match="speculative is 'ngram' and draft= is given too"):
        engine(speculative="ngram", draft=lambda request, limit: [])


def test_a_source_that_would_never_be_asked_is_refused(engine: Engines) -> None:
    with pytest.raises(ValueError, match="draft= is given and max_draft_tokens is 0: set it to 1 or more"):
        engine(draft=lambda request, limit: [])
