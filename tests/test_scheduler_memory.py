"""Give few blocks: less is cached, fewer requests run, some restart, and all get their tokens."""

from __future__ import annotations

import pytest

from mambacache.config import SamplingParams
from mambacache.scheduler.request import Request
from symbolic import text
from symbolic_driver import Driver, Job, Mix, run
from test_scheduler_steps import Steps, rows


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 64, 1000])
def test_two_states_and_the_pages_of_a_request_finish_all_requests(budget: int, ahead: bool) -> None:
    jobs = [Job(text(150, seed % 2) + text(20, seed), 50) for seed in range(4)]
    run(jobs, num_state_blocks=2, num_kv_blocks=4, budget=budget, ahead=ahead)


@pytest.mark.parametrize("drafts", range(1, 8))
def test_the_least_blocks_for_drafts_finish_all_requests(drafts: int) -> None:
    jobs = [Job(text(100, seed), 50) for seed in range(3)]
    options = {"num_state_blocks": 2, "num_kv_blocks": 3, "max_draft_tokens": drafts}
    d = run(jobs, draft_errors=5, max_num_seqs=1, **options)
    assert d.steps < 3 * 50 * (2 if drafts == 1 else 1)
    run(jobs, draft_errors=5, **options)


def test_admission_keeps_pages_for_the_prompts_that_run() -> None:
    jobs = [Job(text(50 * 64, seed), 1) for seed in range(5)]
    d = run(jobs, num_kv_blocks=70, budget=512)
    assert d.cache.stats.preemptions == 0
    assert d.tokens_computed == 5 * 50 * 64


def test_a_prompt_that_does_not_fit_holds_back_later_prompts() -> None:
    s = Steps({"num_kv_blocks": 6})
    s.add("a", text(200), max_tokens=2)
    s.add("b", text(200, 1), max_tokens=2)
    s.add("c", text(10, 2), max_tokens=2)
    assert [row[0] for row in s.run()] == ["a"]
    assert [row[0] for row in s.run()] == ["a"]
    assert [row[0] for row in s.run()] == ["b"]


def test_the_youngest_request_is_preempted_and_keeps_its_place() -> None:
    s = Steps({"num_kv_blocks": 3}, max_num_seqs=3)
    for name in "abcd":
        s.add(name, text(60, ord(name)), max_tokens=30)
    s.run()
    for _ in range(4):
        s.run()
    assert s.cache.stats.preemptions == 0
    assert [row[0] for row in s.run()] == ["a"]  # c is preempted for a page of a; b, older than c, waits
    assert s.cache.stats.preemptions == 1
    assert [row[0] for row in s.run()] == ["a"]
    order: list[str] = []
    while not s.scheduler.idle:
        order += [row[0] for row in s.run() if row[0] not in order]
    assert order == ["a", "b", "c", "d"]


def test_a_preempted_request_resumes_from_its_deepest_state() -> None:
    d = Driver(Mix([Job(text(200, 1), 60)], cache={"num_state_blocks": 8, "num_kv_blocks": 8}))
    d.submit(0)
    for _ in range(58):
        d.step()
    d.cache.preempt("0.0")
    d.scheduler._running.clear()
    d.scheduler._waiting.push(d.scheduler.requests["0.0"])
    while not d.scheduler.idle:
        d.step()
    d.check()
    assert [hit.num_tokens for _, hit in d.cache.hits] == [0, 256]


def test_the_oldest_request_is_never_preempted() -> None:
    jobs = [Job(text(60, seed), 100) for seed in range(4)]
    d = run(jobs, num_kv_blocks=5, num_state_blocks=5)
    assert d.cache.stats.preemptions > 0
    assert [request_id for request_id, _ in d.cache.hits].count("0.0") == 1


def test_a_row_without_a_victim_waits_a_step() -> None:
    # b decodes in this step already, and a needs a second state block to go on.
    s = Steps({"num_state_blocks": 2}, max_num_batched_tokens=65)
    s.add("a", text(200), max_tokens=5)
    s.add("b", text(1, 1), max_tokens=3)
    assert s.run() == [("a", 0, 64), ("b", 0, 1)]
    assert s.run() == [("b", 1, 1)]
    assert s.run() == [("b", 2, 1)]
    assert s.run() == [("a", 64, 64)]
    assert s.cache.stats.preemptions == 0


def test_an_older_request_without_a_row_is_not_preempted() -> None:
    s = Steps({"num_kv_blocks": 5}, long_prefill_token_threshold=60)
    s.add("a", text(256), max_tokens=5)
    s.run()
    s.run()
    s.add("b", text(60, 1), max_tokens=20)
    for _ in range(5):
        s.run()
    assert s.run() == [("a", 252, 4)]  # b lacks a page, and a holds all others
    assert s.cache.stats.preemptions == 0


def test_more_requests_than_blocks_all_finish() -> None:
    jobs = [Job(text(40 + seed, seed), 30) for seed in range(30)]
    for blocks in (2, 3, 7):
        run(jobs, num_state_blocks=blocks, num_kv_blocks=blocks, max_num_seqs=30)


def test_aborting_all_at_any_time_frees_everything() -> None:
    for when in range(12):
        jobs = [Job(text(150, seed), 20, n=2, aborts=when) for seed in range(4)]
        for ahead in (False, True):
            d = run(jobs, ahead=ahead, num_state_blocks=7, num_kv_blocks=9, budget=100)
            assert d.steps <= when + 2


def test_an_answer_may_fill_the_pool_to_its_last_slot() -> None:
    s = Steps({"num_kv_blocks": 2, "num_state_blocks": 2})
    s.scheduler.add(Request("a", text(100), SamplingParams(max_tokens=29)))  # the last token is never consumed
    while not s.scheduler.idle:
        last = s.plan()
        s.scheduler.issued(last)
        s.scheduler.update(last, [[0] * step.samples for step in last.steps])
    assert rows(last) == [("a", 127, 1)]
