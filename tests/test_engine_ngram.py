"""Engines that draft from their own requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_driver import Engines, Original, answer, ask, greedy, run_until_idle, tokens_of
from mambacache import LLM, SamplingParams
from mambacache.engine.outputs import RequestOutput
from mambacache.kernels import StateIndices, draft_from_history
from mambacache.plan import PLACEHOLDER, StepPlan
from mambacache.runner import ngram
from selection import full

REPEATED = tokens_of(1, 40) * 3
PROMPTS = [REPEATED, [*tokens_of(2, 90), *tokens_of(2, 30)], tokens_of(3, 5), [7] * 70]


@pytest.mark.parametrize("model", ["qwen3_next", *full("mamba2")])
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


ASKED: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": (REPEATED, greedy(80)),
    "drawn": ([*tokens_of(2, 90), *tokens_of(2, 30)], greedy(60, temperature=1.0, seed=3, logprobs=2)),
    "stops": ([7] * 70, greedy(60, temperature=1.0, seed=11, stop_token_ids=list(range(2, 30)))),
    "short": (tokens_of(3, 5), greedy(3)),
    "least tokens": (REPEATED[:100], greedy(50, min_tokens=20, ignore_eos=False)),
    "biased": (REPEATED[:90], greedy(40, logit_bias={5: 4.0})),
    "several": (REPEATED[:33], greedy(40, n=2, temperature=0.3, seed=5)),
    "penalised": (REPEATED[:50], greedy(20, repetition_penalty=1.2)),
}


def answers(llm: LLM) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    for i, (name, (prompt, params)) in enumerate(ASKED.items()):
        if params.penalizes:  # all would wait with it
            found |= run_until_idle(llm, found)
        llm.submit(prompt, params, name)
        if i % 2:
            found |= {output.request_id: output for output in llm.step()}
    return run_until_idle(llm, found)


@pytest.mark.full
@pytest.mark.parametrize("model", ["qwen3_next", "mamba2"])
@pytest.mark.parametrize("drafts", [1, 7, 3])
def test_a_step_ahead_changes_nothing(
    engine: Engines, drafts: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that answers are the same a step ahead. The engine accepts at most the drafts that it makes."""
    plain = answers(engine(model, max_num_batched_tokens=150))
    texts = [[*ASKED[name][0], *each.token_ids] for name, output in plain.items() for each in output.outputs]

    def right_mostly(indices: StateIndices, histories: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return drafts from the known answers, with a wrong token at every tenth position."""
        tokens = indices.tokens[: indices.num_decodes * indices.tokens_per_decode].view(indices.num_decodes, -1)
        is_open = tokens == PLACEHOLDER
        begun = draft_from_history(indices, histories, lengths)
        for row, mask, slot in zip(tokens[:, 1:], is_open[:, 1:], indices.log_slot, strict=True):
            known, count = histories[slot, : lengths[slot]].tolist(), len(row)
            text = next((text for text in texts if text[: len(known)] == known), [])
            following = [0 if i % 10 == 0 else token for i, token in enumerate(text)][len(known) :][:count]
            drafts = torch.tensor([*following, *[0] * count][:count], dtype=torch.int32, device=row.device)
            row[mask] = drafts[mask]
        return begun

    monkeypatch.setattr(ngram, "draft_from_history", right_mostly)
    for ahead in (0, 1):
        llm = engine(model, speculative="ngram", max_draft_tokens=drafts, max_num_batched_tokens=150)
        llm._step_loop.steps_ahead, launch, late = ahead, llm.runner.launch, Counter[bool]()

        def launching(plan: StepPlan, *args: Any, launch: Any = launch, late: Counter[bool] = late) -> Any:
            late.update(step.unplaced_by > 0 for step in plan.steps)
            return launch(plan, *args)

        llm.runner.launch = launching
        found = answers(llm)
        assert bool(late[True]) == bool(ahead)
        for name, output in plain.items():
            for one, other in zip(output.outputs, found[name].outputs, strict=True):
                assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason), name
                for there, wanted in zip(other.logprobs or (), one.logprobs or (), strict=True):
                    assert there == pytest.approx(wanted, abs=1e-3), name
                assert 0 <= other.num_accepted_tokens <= other.num_draft_tokens
        assert sum(each.num_accepted_tokens for each in found["greedy"].outputs) > 25


def test_two_draft_sources_are_refused(engine: Engines) -> None:
    with pytest.raises(ValueError, match="speculative is 'ngram' and draft= is given too"):
        engine(speculative="ngram", draft=lambda request, limit: [])


def test_a_source_that_would_never_be_asked_is_refused(engine: Engines) -> None:
    with pytest.raises(ValueError, match="draft= is given and max_draft_tokens is 0: set it to 1 or more"):
        engine(draft=lambda request, limit: [])
