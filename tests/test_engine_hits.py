"""Check the hits of requests, and the reasons why they are no longer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from engine_driver import (
    Engines,
    Original,
    answer,
    ask,
    floor,
    greedy,
    hits,
    report_of,
    run_until_idle,
    tokens_of,
)
from mambacache import LLM
from mambacache.report import Loss
from selection import full

Originals = Callable[[str], Original]

BUDGETS = (64, 200, 8192)
ONE = greedy(1)


def computed_tokens(engine: Engines) -> int:
    """Prompt tokens that were not hit, of all requests that were admitted."""
    return sum(report.prompt - report.hit for report in engine.reports)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("budget", [*full(1, 7), *BUDGETS])
def test_identical_prompt(engine: Engines, budget: int, strict: bool) -> None:
    """An identical prompt hits its last boundary; under `strict_reuse` only if it was computed in whole chunks."""
    llm = engine(max_num_batched_tokens=budget, strict_reuse=strict)
    for length in (65, 128, 140) if budget > 1 else (70,):
        prompt = tokens_of(length, length)
        first, second = ask(llm, [prompt] * 2, ONE, together=False)
        assert answer(first) == answer(second)
        assert hits([first, second]) == [0, 0 if strict and budget < 64 else floor(length - 1)]
    assert (llm.stats.losses[Loss.ONLY_NEAR] > 0) == (strict and budget < 64)


@pytest.mark.parametrize("budget", BUDGETS)
def test_third_prompt_hits_all_that_is_shared(engine: Engines, original: Originals, budget: int) -> None:
    """The second one too where a step happened to end at the junction."""
    shared = tokens_of(1, 200)
    prompts = [[*shared, *tokens_of(seed, 90)] for seed in (2, 3, 4)]
    llm = engine(max_num_batched_tokens=budget)
    outputs = ask(llm, prompts, greedy(4), together=False)
    original("qwen3_next").check_all(prompts, outputs)
    missed = {} if budget < 8192 else {Loss.NO_STATE: 192}
    assert hits(outputs) == [0, 0 if missed else 192, 192]
    assert report_of(outputs[1]).losses == {Loss.GRANULARITY: 8} | missed


@pytest.mark.parametrize("count", [3, *full(64)])
@pytest.mark.parametrize("budget", BUDGETS)
def test_submitted_together(engine: Engines, budget: int, count: int) -> None:
    """Check that a shared prefix is computed once, by the first request. The others wait for it and hit."""
    shared = tokens_of(5, 200)
    llm = engine(max_num_batched_tokens=budget, num_kv_blocks=400, max_num_seqs=count)
    outputs = ask(llm, [[*shared, 2 + i, *tokens_of(6, 4)] for i in range(count)], ONE)
    assert hits(outputs) == [0] + [192] * (count - 1)
    assert computed_tokens(engine) == 192 + count * 13
    assert llm.stats.preemptions == 0 and (llm.stats.waits > 0 or budget == 64)


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_abort_of_the_request_that_computes_a_shared_prefix(engine: Engines, original: Originals, when: str) -> None:
    """Check that another request takes over where the aborted request had committed. Pools and cache are then as
    ever."""
    shared = tokens_of(7, 300)
    prompts = [[*shared, *tokens_of(seed, 20)] for seed in (8, 9, 10)]
    llm = engine(max_num_batched_tokens=100, num_kv_blocks=14)
    ids = [llm.submit(prompt, greedy(5)) for prompt in prompts]
    outputs = {}
    for _ in range({"waiting": 0, "prefilling": 2, "decoding": 5}[when]):
        outputs |= {output.request_id: output for output in llm.step()}
    llm.abort(ids[0])
    llm.abort(ids[0])
    outputs = run_until_idle(llm, outputs)
    assert set(outputs) - {ids[0]} == set(ids[1:])
    assert (ids[0] in outputs) == (when == "decoding")
    if when == "decoding":
        assert outputs[ids[0]].outputs[0].finish_reason == "abort" and 0 < len(answer(outputs[ids[0]])) < 5
    rest = [outputs[request_id] for request_id in ids[1:]]
    original("qwen3_next").check_all(prompts[1:], rest)
    ahead = 64 * llm._step_loop.steps_ahead  # that far more it had come
    assert hits(rest) == {"waiting": [0, 256], "prefilling": [128 + ahead, 256], "decoding": [256, 256]}[when]
    again = ask(llm, prompts, greedy(5))
    original("qwen3_next").check_all(prompts, again)
    assert hits(again) == [256] * 3


@pytest.mark.parametrize(("prompt_length", "answer_length"), [(40, 30), (100, 28), (100, 29), (100, 93), (127, 2)])
def test_next_turn_of_a_chat(engine: Engines, original: Originals, prompt_length: int, answer_length: int) -> None:
    prompt = tokens_of(prompt_length, prompt_length)
    llm = engine()
    first = ask(llm, [prompt], greedy(answer_length))[0]
    turn = [*prompt, *answer(first), *tokens_of(11, 30)]
    second = ask(llm, [turn], greedy(4))
    original("qwen3_next").check_all([turn], second)
    assert hits(second) == [floor(prompt_length + answer_length - 1)]


def test_salts_separate(engine: Engines) -> None:
    prompt = tokens_of(12, 200)
    llm = engine()
    salts = ["", "", "a", "a", "b"]
    outputs = ask(llm, [prompt] * len(salts), [greedy(3, salt=salt) for salt in salts], together=False)
    assert hits(outputs) == [0, 192, 0, 192, 0]
    assert [report_of(output).ceiling for output in outputs] == [0, 199, 0, 199, 0]
    assert len({tuple(answer(output)) for output in outputs}) == 1
    together = ask(llm, [tokens_of(13, 200)] * 2, [greedy(1, salt=salt) for salt in "cd"])
    assert hits(together) == [0, 0] and llm.stats.waits == 0


def test_read_cache_and_store_cache(engine: Engines) -> None:
    prompt = tokens_of(14, 200)
    llm = engine()
    params = [greedy(1, store_cache=False), greedy(1), greedy(1, read_cache=False), greedy(1)]
    outputs = ask(llm, [prompt] * 4, params, together=False)
    assert hits(outputs) == [0, 0, 0, 192]


def test_exactness_is_inherited(engine: Engines) -> None:
    """decode -> prefill -> prefill: a near state makes all that is computed from it near."""
    for strict, expected in ((False, [0, 192, 256]), (True, [0, 128, 256])):
        llm = engine(strict_reuse=strict)
        prompt = tokens_of(15, 130)
        outputs = ask(llm, [prompt], greedy(70))
        turn = [*prompt, *answer(outputs[0]), *tokens_of(16, 80)]
        outputs += ask(llm, [turn, turn], ONE, together=False)
        assert hits(outputs) == expected
        llm.cache.add("probe", turn)
        assert llm.cache.match("probe").exact == strict
        llm.cache.free("probe", finished=False)


def test_checkpoint_interval(engine: Engines) -> None:
    prompt = tokens_of(17, 500)
    prompts = [prompt, prompt[:420], prompt[:200], prompt[:100]]
    llm = engine(checkpoint_interval=128)
    assert hits(ask(llm, prompts, ONE, together=False)) == [0, 384, 128, 0]


def test_reset_prefix_cache(engine: Engines, original: Originals) -> None:
    """Check that a running request goes on with its cached prefix. Later requests hit no block from before the reset,
    and none of this request."""
    prompts = [tokens_of(18, 200), tokens_of(19, 150)]
    llm = engine(max_num_batched_tokens=64)
    ask(llm, prompts[:1], greedy(3))
    request_id = llm.submit(prompts[1], greedy(40))
    for _ in range(10):
        outputs = {output.request_id: output for output in llm.step()}
    llm.reset_prefix_cache()
    outputs = run_until_idle(llm, outputs)
    original("qwen3_next").check_all(prompts[1:], [outputs[request_id]])
    again = ask(llm, prompts, greedy(3))
    assert hits(again) == [0, 0]
    again = ask(llm, prompts, greedy(3))
    original("qwen3_next").check_all(prompts, again)
    assert hits(again) == [192, 128]


# --- why not more ---


def lose_to_granularity(engine: Engines) -> tuple[LLM, Sequence[int]]:
    llm = engine()
    ask(llm, [tokens_of(20, 150)], ONE)
    return llm, tokens_of(20, 150)


def lose_without_a_state(engine: Engines) -> tuple[LLM, Sequence[int]]:
    llm, prompt = lose_to_granularity(engine)
    return llm, prompt[:100]


def lose_to_eviction(engine: Engines) -> tuple[LLM, Sequence[int]]:
    llm = engine(num_checkpoints=2)
    ask(llm, [tokens_of(20 + i, 150) for i in range(3)], ONE, together=False)
    return llm, tokens_of(20, 150)


def lose_for_lack_of_capacity(engine: Engines) -> tuple[LLM, Sequence[int]]:
    llm = engine(num_checkpoints=0)
    ask(llm, [tokens_of(20, 150)], ONE)
    return llm, tokens_of(20, 150)


def lose_what_is_near(engine: Engines) -> tuple[LLM, Sequence[int]]:
    llm = engine(strict_reuse=True, max_num_batched_tokens=50)
    ask(llm, [tokens_of(20, 150)], ONE)
    return llm, tokens_of(20, 150)


def lose_unasked(engine: Engines) -> tuple[LLM, Sequence[int]]:
    llm = engine(enable_prefix_caching=False)
    ask(llm, [tokens_of(20, 150)], ONE)
    return llm, tokens_of(20, 150)


LOSSES = {
    Loss.GRANULARITY: (lose_to_granularity, {Loss.GRANULARITY: 21}),
    Loss.NO_STATE: (lose_without_a_state, {Loss.GRANULARITY: 35, Loss.NO_STATE: 64}),
    Loss.EVICTED: (lose_to_eviction, {Loss.GRANULARITY: 21, Loss.EVICTED: 128}),
    Loss.NO_CAPACITY: (lose_for_lack_of_capacity, {Loss.GRANULARITY: 21, Loss.NO_CAPACITY: 128}),
    Loss.ONLY_NEAR: (lose_what_is_near, {Loss.GRANULARITY: 21, Loss.ONLY_NEAR: 128}),
    Loss.NOT_ASKED: (lose_unasked, {Loss.NOT_ASKED: 149}),
}


@pytest.mark.parametrize("reason", Loss)
def test_every_reason(engine: Engines, reason: Loss) -> None:
    lose, expected = LOSSES[reason]
    llm, prompt = lose(engine)
    assert report_of(ask(llm, [prompt], ONE)[0]).losses == expected
    assert llm.stats.losses[reason] >= expected[reason]


# --- the budget of checkpoints ---


def test_budget_of_no_checkpoints(engine: Engines, original: Originals) -> None:
    prompts = [tokens_of(30 + i, 100) for i in range(3)] * 2
    llm = engine(num_checkpoints=0)
    outputs = ask(llm, prompts, greedy(40))
    original("qwen3_next").check_all(prompts, outputs)
    assert hits(outputs) == [0] * 6 and llm.stats.states_stored == 0


def test_budget_below_one_state(engine: Engines, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = engine(checkpoint_budget_bytes=1000)
    assert "checkpoint_budget_bytes is 1000" in caplog.text and "raise it" in caplog.text
    assert llm.sizes.max_checkpoints == 0
    assert hits(ask(llm, [tokens_of(33, 100)] * 2, ONE, together=False)) == [0, 0]


def test_budget_of_one_checkpoint(engine: Engines) -> None:
    llm = engine(num_checkpoints=1)
    prompts = [tokens_of(34, 100), tokens_of(34, 100), tokens_of(35, 100), tokens_of(34, 100), tokens_of(34, 100)]
    assert hits(ask(llm, prompts, ONE, together=False)) == [0, 64, 0, 0, 64]
    assert llm.stats.states_evicted == 2
