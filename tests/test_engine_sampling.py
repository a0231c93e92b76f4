"""Penalties, biases, `min_tokens`, and what is left in texts, through the whole engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_driver import TIE, Engines, Original, answer, ask, greedy, speak, tokens_of
from mambacache import LLM, DraftTree, SamplingParams
from mambacache.scheduler.request import Request
from selection import full

Originals = Callable[[str], Original]

PROMPTS = [tokens_of(1, 120), [7, 9] * 30, tokens_of(3, 70)]
PARAMS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {20: 3.0, 30: 2.5, 31: 2.5, 32: 2.5}, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
]
LENGTH = 16


def check(original: Original, prompt: list[int], params: SamplingParams, tokens: list[int]) -> int:
    """Fails unless each token is the most likely one once the logits are adjusted; how often they made a difference."""
    differences = 0
    for count, (token, raw) in enumerate(zip(tokens, original.after(prompt, tokens), strict=True)):
        logits, before = raw.clone(), tokens[:count]
        for biased, bias in (params.logit_bias or {}).items():
            logits[biased] += bias
        seen = [*{*prompt, *before}]
        logits[seen] = torch.where(
            logits[seen] > 0, logits[seen] / params.repetition_penalty, logits[seen] * params.repetition_penalty
        )
        for answered, times in Counter(before).items():
            logits[answered] -= params.frequency_penalty * times + params.presence_penalty
        assert logits.max() - logits[token] < TIE
        differences += int(raw.argmax()) != token
    return differences


@pytest.mark.parametrize(
    "options",
    [{"num_kv_blocks": 5}, {"drafts": "trees"}, *full({}, {"max_num_batched_tokens": 70}, {"drafts": "chains"})],
)
def test_penalties(engine: Engines, original: Originals, options: dict[str, Any]) -> None:
    """Check penalties in a batch, after preemptions and with drafts. A draft counts for the tokens that follow it."""
    options = dict(options)
    params = [greedy(LENGTH, **each) for each in PARAMS]
    known: dict[tuple[int, ...], list[int]] = {}

    drafts = options.pop("drafts", None)

    def draft(request: Request, limit: int) -> list[int] | DraftTree:
        """Return right drafts with a wrong token now and then. A tree has two wrong tokens as a branch beside the right
        drafts."""
        upcoming = known.get(tuple(request.prompt), [])[len(request.output) :][:limit]
        if drafts == "trees" and upcoming:
            return DraftTree([7, 8, *upcoming][:limit], [0, 1, 0, *range(3, 9)][: min(limit, 2 + len(upcoming))])
        return [*upcoming[:-1], 5] if len(request.output) % 3 == 1 else upcoming

    llm = engine(draft=draft, max_draft_tokens=5, **options) if drafts else engine(**options)
    differences = 0
    for _ in range(2):
        outputs = ask(llm, [*PROMPTS, PROMPTS[2]], [*params, greedy(LENGTH)])
        for prompt, its_params, output in zip(PROMPTS, params, outputs, strict=False):
            differences += check(original("qwen3_next"), prompt, its_params, answer(output))
            known[tuple(prompt)] = answer(output)
        original("qwen3_next").check(PROMPTS[2], answer(outputs[3]))
    assert differences > 30
    assert "num_kv_blocks" not in options or llm.stats.preemptions > 0


def test_several_drawn_answers(engine: Engines) -> None:
    """Check that each answer counts its own tokens. It is the same as for a separate request with its seed."""
    params = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True, **PARAMS[2]}
    together = ask(engine(), [PROMPTS[1]], SamplingParams(n=3, seed=5, **params))[0]
    alone = ask(engine(), [PROMPTS[1]] * 3, [SamplingParams(seed=5 + i, **params) for i in range(3)])
    assert [completion.token_ids for completion in together.outputs] == [answer(output) for output in alone]
    assert len({tuple(completion.token_ids) for completion in together.outputs}) == 3


def test_logprobs_are_those_of_the_model(engine: Engines, original: Originals) -> None:
    output = ask(engine(), PROMPTS[:1], greedy(5, logprobs=0, **PARAMS[0]))[0].outputs[0]
    exact = original("qwen3_next").after(PROMPTS[0], output.token_ids).log_softmax(-1)
    expected = exact.gather(-1, torch.tensor(output.token_ids)[:, None]).sum().item()
    assert output.cumulative_logprob == pytest.approx(expected, abs=1e-3)
    assert ask(engine(), PROMPTS[:1], greedy(1))[0].outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens(engine: Engines, ignore_eos: bool) -> None:
    """End tokens and stop tokens cannot come before."""
    llm = engine()
    llm._end_tokens = frozenset(range(80))
    options: dict[str, Any] = {"stop_token_ids": [*range(80, 120), 5000], "ignore_eos": ignore_eos}
    outputs = [ask(llm, PROMPTS, greedy(12, min_tokens=count, **options)) for count in (0, 5, 12)]
    for count, each in zip((0, 5, 12), outputs, strict=True):
        for output in each:
            tokens = answer(output)
            assert all(token >= 120 for token in tokens[:count])
            assert len(tokens) > count or count == 12 == len(tokens)
    assert any(len(answer(output)) < 5 for output in outputs[0]) or ignore_eos


def test_bias_outside_the_vocabulary(engine: Engines) -> None:
    with pytest.raises(ValueError, match=r"logit_bias of prompt 1 holds token 160, .* give ids from 0 to 159"):
        ask(engine(), PROMPTS[:2], [greedy(1), greedy(1, logit_bias={3: 1, 160: 1})])


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({"stop": ["stop"]}, "a ", "stop"),
        ({"stop": ["stop"], "include_stop_str_in_output": True}, "a stop", "stop"),
        ({"stop": ["stop", " s"], "min_tokens": 6}, "a stop b", " s"),
        ({"stop_token_ids": [ord("b") - 33]}, "a stop ", ord("b") - 33),
        ({"stop_token_ids": [ord("b") - 33], "include_stop_str_in_output": True}, "a stop b", ord("b") - 33),
        ({"include_stop_str_in_output": True}, "a stop b stop", None),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a stop b stop<eos>", None),
        ({"stop_token_ids": [256]}, "a stop b stop", None),
        ({"stop_token_ids": [256], "ignore_eos": True}, "a stop b stop", 256),
    ],
)
def test_stops(engine: Engines, text_model: Path, options: dict[str, Any], text: str, reason: str | int | None) -> None:
    llm: LLM = engine(text_model)
    assert llm.tokenizer.encode("b") == [ord("b") - 33]
    speak(llm, "a stop b stop")
    outputs = list(llm.stream("x", SamplingParams(max_tokens=30, **options)))
    completion = outputs[-1].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", reason)
    assert completion.text.endswith(completion.delta)
    speak(llm, "a")
    assert llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].stop_reason is None


@pytest.mark.parametrize("options", [*full({}), {"speculative": "ngram"}], ids=["known", "drafted"])
def test_draws_of_all_kinds_together_are_those_of_each_alone(engine: Engines, options: dict[str, Any]) -> None:
    """Check that draws are right although their order follows the kind of cut, not the order of rows."""
    prompts = [[*tokens_of(1, 40)] * 3, [7] * 70, tokens_of(3, 5), tokens_of(5, 80), [*tokens_of(2, 30)] * 3]
    params = [
        greedy(30, temperature=1.0, seed=1, top_p=0.9, logit_bias={5: 4.0}),
        greedy(30, temperature=0.8, seed=2),
        greedy(30),
        greedy(30, temperature=0.7, seed=5, top_k=5, logprobs=2, n=2),
        greedy(30, temperature=0.3, seed=4, min_p=0.05, logit_bias={9: 3.0, 11: 3.0}),
    ]
    together, alone = ask(engine(**options), prompts, params), ask(engine(), prompts, params, together=False)
    for one, other in zip(together, alone, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        for each, wanted in zip(one.outputs, other.outputs, strict=True):
            assert [[*entry] for entry in each.logprobs or ()] == [[*entry] for entry in wanted.logprobs or ()]
