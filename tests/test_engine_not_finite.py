"""Logits that are NaN end the request that has them, and nothing that was computed on the way to them stays cached."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from cache_calls import allocate
from engine_driver import Engines, Original, answer, ask, greedy, hits, report_of, tokens_of
from mambacache import LLM
from mambacache.scheduler.request import Request
from selection import full
from symbolic import text
from test_cache_surface import look
from watched_cache import all_free, under_way, watched

Originals = Callable[[str], Original]

BAD = 3
"""The token whose embedding is spoilt."""


def prompt_of(seed: int, count: int) -> list[int]:
    return [token + (token == BAD) for token in tokens_of(seed, count)]


def embedding(llm: LLM, token: int) -> torch.Tensor:
    return llm.runner.model.module.get_input_embeddings().weight.data[token]


@pytest.mark.parametrize("value", [torch.nan, *full(torch.inf)])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("budget", [80, 8192])
def test_prompt(engine: Engines, original: Originals, value: float, n: int, budget: int) -> None:
    """Check a prompt that may be cut into several steps. The first steps have no logits, and their states are
    stored."""
    llm = engine(max_num_batched_tokens=budget)
    sound, weights = [prompt_of(1, 150), prompt_of(2, 100)], embedding(llm, BAD).clone()
    bad = [*prompt_of(3, 20), BAD, *prompt_of(4, 180)]
    ask(llm, sound[:1], greedy(1))
    embedding(llm, BAD).fill_(value)
    outputs = ask(llm, [sound[0], bad, sound[1]], [greedy(5), greedy(5, n=n, logprobs=1), greedy(5)])
    original("qwen3_next").check_all(sound, outputs[::2])
    assert [len(answer(output)) for output in outputs] == [5, 0, 5] and hits(outputs)[0] == 128
    for completion in outputs[1].outputs:
        assert completion.finish_reason == "error" and not completion.logprobs
        assert completion.error is not None and "\n" not in completion.error
        assert completion.error.startswith("the model's logits after 201 tokens are NaN or infinite: use another dtype")
    embedding(llm, BAD).copy_(weights)
    again = ask(llm, [bad, sound[0]], greedy(5))
    original("qwen3_next").check_all([bad, sound[0]], again)
    assert hits(again) == [0, 128]


@pytest.mark.parametrize("drafts", [False, True])
def test_answer(engine: Engines, original: Originals, drafts: bool) -> None:
    """Check that the tokens before the fault, with finite logits, are kept."""
    prompts = [[4 + token % 50 for token in prompt_of(seed, 200 - 50 * seed)] for seed in (1, 2)]
    truth = [answer(output) for output in ask(engine(), prompts, greedy(40))]
    token = next(token for token in truth[0][5:] if token > 53 and token not in [*truth[0][:5], *truth[1]])
    place = truth[0].index(token) + 1

    def draft(request: Request, limit: int) -> list[int]:
        """Return right drafts up to the token. Beside a NaN, masked attention is NaN too."""
        return truth[0][: place - 1][len(request.output) :][:limit] if list(request.prompt) == prompts[0] else []

    llm = engine(draft=draft, max_draft_tokens=3) if drafts else engine()
    embedding(llm, token).fill_(torch.nan)
    outputs = ask(llm, prompts, greedy(40))
    completion = outputs[0].outputs[0]
    assert completion.finish_reason == "error" and f"after {150 + place} tokens" in (completion.error or "")
    assert [answer(output) for output in outputs] == [truth[0][:place], truth[1]]
    again = ask(llm, prompts, greedy(3))
    original("qwen3_next").check_all(prompts, again)
    assert hits(again) == [128, 64]


@pytest.mark.parametrize("ahead", [0, 1])
def test_request_that_hits_a_bad_state_ends_and_the_state_is_dropped(engine: Engines, ahead: int) -> None:
    """Check a state that was stored by a request without logits, which was aborted. A step in flight stores its state
    as well."""
    llm = engine(max_num_batched_tokens=80, checkpoint_interval=64)
    llm._step_loop.steps_ahead = ahead
    bad = [*prompt_of(3, 20), BAD, *prompt_of(4, 180)]
    weights = embedding(llm, BAD).clone()
    embedding(llm, BAD).fill_(torch.nan)
    aborted = llm.submit(bad, greedy(2))
    llm.step()
    llm.abort(aborted)
    embedding(llm, BAD).copy_(weights)
    first, second = (ask(llm, [bad], greedy(2))[0] for _ in range(2))
    computed = 64 * (1 + ahead)
    assert (report_of(first).hit, first.outputs[0].finish_reason) == (computed, "error")
    assert (report_of(second).hit, second.outputs[0].finish_reason) == (0, "length")


def test_a_bad_prompt_leaves_the_prefix_that_it_hit(engine: Engines, original: Originals) -> None:
    llm = engine()
    prefix, weights = prompt_of(3, 150), embedding(llm, BAD).clone()
    ask(llm, [prefix], greedy(1))
    embedding(llm, BAD).fill_(torch.nan)
    outputs = ask(llm, [[*prefix, BAD, *prompt_of(4, 90)]], greedy(2)) + ask(llm, [prefix], greedy(3))
    assert outputs[0].outputs[0].finish_reason == "error" and hits(outputs) == [128, 128]
    original("qwen3_next").check_all([prefix], outputs[1:])
    embedding(llm, BAD).copy_(weights)


@pytest.mark.parametrize("kind", ["state", "page"])
def test_a_bad_block_is_found_once_and_then_dropped(engine: Engines, original: Originals, kind: str) -> None:
    """Something else has spoilt a cached block: the first request that resumes there ends, the next one is right."""
    llm = engine()
    prompts = [prompt_of(3, 150), prompt_of(5, 150)]
    ask(llm, prompts, greedy(1))
    cache = llm._step_loop._scheduler.cache
    cache.add("look", prompts[0])
    cache.admit("look")
    spoilt = cache.suspects("look")[0]
    cache.free("look", finished=False)
    pool = llm.runner.states if kind == "state" else llm.runner.pages
    block = spoilt.state if kind == "state" else spoilt.page
    assert pool is not None and block
    with _disable_current_modes():  # this is the fault that the watch over the pool looks for
        pool.slabs[block, -pool.block_bytes // 8 :].fill_(0xFF)  # NaN in every dtype, in the last layers
    first, again = ask(llm, prompts, greedy(3)), ask(llm, prompts, greedy(3))
    assert [output.outputs[0].finish_reason for output in first] == ["error", "length"] and hits(first) == [128, 128]
    original("qwen3_next").check_all(prompts, again)
    assert hits(again) == [0, 128]


# --- the cache itself ---


@pytest.mark.parametrize(("start", "found"), [(0, 0), (63, 0), (64, 64), (130, 128), (200, 192)])
def test_wrong_blocks_are_not_found(start: int, found: int) -> None:
    cache = watched()
    cache.add("a", text(200), checkpoint_at=(64, 128, 192))
    cache.admit("a")
    under_way(cache, "accepted")
    cache.add("b", text(200))
    assert cache.admit("b").num_tokens == 192  # type: ignore[union-attr]
    cache.free("a", finished=False, wrong_from=start)
    assert look(cache, text(201)).num_tokens == found
    for step in [allocate(cache, "b", 8)]:
        cache.plan([step])
        cache.issued([step])
        cache.accept([step], {"b": [1]})
    all_free(cache)
