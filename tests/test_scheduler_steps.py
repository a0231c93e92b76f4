"""Check the rows of a step: order, budgets, alignment and failures."""

from __future__ import annotations

from typing import Any

import pytest

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig, SamplingParams
from mambacache.plan import StepPlan
from mambacache.scheduler.request import FinishReason, Request
from mambacache.scheduler.scheduler import Scheduler
from symbolic import text
from symbolic_driver import Driver, Job, Mix, run

Rows = list[tuple[str, int, int]]  # request, start, tokens


class Steps:
    """Drive a scheduler that samples only 0; `run` returns the rows of a step."""

    def __init__(self, cache: dict[str, Any] | None = None, **options: Any) -> None:
        self.cache = PrefixCache(CacheConfig(**{"num_state_blocks": 64, "num_kv_blocks": 64, **(cache or {})}))
        limits = {"max_num_batched_tokens": 200, "max_num_seqs": 8, **options}
        self.scheduler = Scheduler(self.cache, **limits)

    def add(self, name: str, prompt: list[int], **params: Any) -> Request:
        request = Request(name, prompt, SamplingParams(**{"max_tokens": 50, **params}))
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def run(self) -> Rows:
        plan = self.plan()
        self.scheduler.issued(plan)
        self.scheduler.update(plan, [[0] * step.samples for step in plan.steps])
        return rows(plan)


def rows(plan: StepPlan) -> Rows:
    return [(step.request_id, step.start, step.num_tokens) for step in plan.steps]


def test_decode_first_then_prefill_in_order_of_arrival() -> None:
    s = Steps()
    s.add("a", text(10))
    assert s.run() == [("a", 0, 10)]
    s.add("b", text(100, 1))
    s.add("c", text(20, 2))
    assert s.run() == [("a", 10, 1), ("b", 0, 100), ("c", 0, 20)]
    s.add("d", text(10, 3))
    assert s.run() == [("a", 11, 1), ("b", 100, 1), ("c", 20, 1), ("d", 0, 10)]


def test_a_prompt_is_cut_on_boundaries() -> None:
    s = Steps(max_num_batched_tokens=150)
    s.add("a", text(300))
    assert [s.run() for _ in range(4)] == [[("a", 0, 128)], [("a", 128, 128)], [("a", 256, 44)], [("a", 300, 1)]]


def test_a_budget_below_a_block_still_moves() -> None:
    s = Steps(max_num_batched_tokens=50)
    s.add("a", text(130))
    assert [s.run()[0][1:] for _ in range(4)] == [(0, 50), (50, 14), (64, 50), (114, 16)]


def test_a_prefill_that_reaches_no_boundary_waits_unless_it_is_the_first() -> None:
    s = Steps(max_num_batched_tokens=150)
    s.add("a", text(100, 1))
    s.add("b", text(100, 2))
    s.add("c", text(30, 3))
    assert s.run() == [("a", 0, 100)]  # 50 left: b would end at 50
    assert s.run() == [("a", 100, 1), ("b", 0, 100), ("c", 0, 30)]


def test_the_last_token_of_a_prompt_is_prefilled_too() -> None:
    s = Steps()
    s.add("a", text(65), max_tokens=1)
    s.run()
    s.add("b", text(65), max_tokens=1)
    plan = s.plan()
    assert rows(plan) == [("b", 64, 1)] and plan.steps[0].prefill and plan.num_decodes == 0


def test_long_prompts_leave_room_for_others() -> None:
    s = Steps(long_prefill_token_threshold=64)
    s.add("a", text(300, 1))
    s.add("b", text(100, 2))
    assert s.run() == [("a", 0, 64), ("b", 0, 64)]
    assert s.run() == [("a", 64, 64), ("b", 64, 36)]


def test_a_budget_spent_on_decoding_leaves_none_for_prompts() -> None:
    s = Steps(max_num_batched_tokens=2)
    for name in "ab":
        s.add(name, text(1, ord(name)))
    s.run()
    s.add("c", text(1, 3))
    assert s.run() == [("a", 1, 1), ("b", 1, 1)]


def test_max_num_seqs_bounds_the_running_requests() -> None:
    s = Steps(max_num_seqs=2)
    for name in "abc":
        s.add(name, text(5, ord(name)), max_tokens=2)
    assert [row[0] for row in s.run()] == ["a", "b"]
    assert [row[0] for row in s.run()] == ["a", "b"]
    assert [row[0] for row in s.run()] == ["c"]


@pytest.mark.parametrize("n", [2, 5])
def test_further_answers_keep_to_the_limits(n: int) -> None:
    d = run([Job(text(100), 20, n=n), Job(text(90, 1), 5)], max_num_seqs=2)
    assert len(d.requests) == n + 1
    tight = run([Job(text(100), 20, n=n)], num_state_blocks=2, num_kv_blocks=2)
    assert len(tight.requests) == n


@pytest.mark.parametrize("ahead", [False, True])
def test_further_answers_compute_the_prompt_once(ahead: bool) -> None:
    d = run([Job(text(100), 20, n=4)], ahead=ahead)
    assert d.tokens_computed == 100 + 4 * 19
    assert all(request.report is d.requests[0, 0].report for request in d.requests.values())


def test_further_answers_of_a_request_that_was_preempted_meanwhile() -> None:
    s = Steps()
    request = Request("a", text(100), SamplingParams(max_tokens=3, n=2))
    request.siblings = [Request("b", request.prompt, request.params)]
    s.scheduler.add(request)
    plan = s.plan()
    s.scheduler.issued(plan)
    assert s.scheduler.schedule() is None  # b begins where the prompt ends, so a does not go on yet
    s.cache.preempt("a")
    del s.scheduler._running[request]
    s.scheduler._waiting.push(request)
    s.scheduler.update(plan, [[5, 6]])
    plan = s.plan()
    assert rows(plan) == [("a", 64, 37), ("b", 64, 37)]
    assert plan.arrays["tokens"].tolist() == [*text(100)[64:], 5, *text(100)[64:], 6]


def test_aborting_the_first_answer_before_it_began_aborts_all() -> None:
    d = run([Job(text(300), 5, n=3, aborts=1)], budget=64)
    assert [request.finish_reason for request in d.requests.values()] == [FinishReason.ABORT] * 3


def test_an_unknown_id_is_ignored() -> None:
    s = Steps()
    s.scheduler.abort("nobody")
    assert s.scheduler.schedule() is None and s.scheduler.idle


def test_an_abort_while_a_step_is_in_flight() -> None:
    s = Steps()
    request = s.add("a", text(100))
    s.add("b", text(100, 1))
    plan = s.plan()
    s.scheduler.issued(plan)
    s.scheduler.abort("a")
    assert [r.request_id for r in s.scheduler.update(plan, [[0], [0]])] == ["b"]
    assert request.finish_reason is FinishReason.ABORT and request.output == []
    s.scheduler.abort("b")
    assert s.cache.stats.kv_blocks["writing"] == s.cache.stats.state_blocks["writing"] == 0


def test_an_abort_spares_a_new_request_with_the_id_of_an_ended_answer() -> None:
    s = Steps()
    first = Request("a", text(100), SamplingParams(max_tokens=3, n=2))
    first.siblings = [Request("b", first.prompt, first.params)]
    s.scheduler.add(first)
    s.scheduler.abort("b")
    again = s.add("b", text(20, 1), max_tokens=2)
    s.scheduler.abort("a")
    assert s.run() == [("b", 0, 20)]
    s.run()
    assert again.output == [0, 0] and s.scheduler.idle


def test_a_plan_that_was_not_issued_is_dropped_when_all_requests_have_ended() -> None:
    s = Steps({"num_state_blocks": 4})
    s.add("a", text(100))
    s.plan()
    s.scheduler.abort("a")
    assert not s.scheduler.idle and s.scheduler.schedule() is None and s.scheduler.idle
    assert s.cache.stats.state_blocks["free"] == 4


def test_all_logits_of_the_prompt_skip_the_hit() -> None:
    s = Steps()
    s.add("a", text(100), max_tokens=1)
    s.run()
    s.add("b", text(100), max_tokens=1, prompt_logprobs=0)
    plan = s.plan()
    assert rows(plan) == [("b", 0, 100)] and plan.steps[0].prompt_logits
    assert len(plan.arrays["logits_index"]) == 100


def test_until_stop_ends_at_a_stop_token_or_max_tokens() -> None:
    prompt = text(10)
    request = Request("a", prompt, SamplingParams(max_tokens=4), frozenset([7]), lambda _, token: token == 9)
    assert request.until_stop([1, 2]) == ([1, 2], None)
    assert request.until_stop([7, 3]) == ([7], FinishReason.STOP)
    request = Request("a", prompt, SamplingParams(max_tokens=4), completes_stop=lambda _, token: token == 9)
    assert request.until_stop([1, 9, 3]) == ([1, 9], FinishReason.STOP)
    request = Request("a", prompt, SamplingParams(max_tokens=2))
    assert request.until_stop([1, 2, 3]) == ([1, 2], FinishReason.LENGTH)
    assert request.output == []


# --- scheduling ahead ---


def test_a_step_is_planned_before_the_tokens_of_the_last_are_known() -> None:
    s = Steps()
    s.add("a", text(10), max_tokens=3)
    plans = []
    for _ in range(3):
        plans.append(s.plan())
        s.scheduler.issued(plans[-1])
    assert [rows(plan) for plan in plans] == [[("a", 0, 10)], [("a", 10, 1)], [("a", 11, 1)]]
    assert s.scheduler.schedule() is None  # the third answer token is in flight
    for plan in plans:
        s.scheduler.update(plan, [[0]])
    assert s.scheduler.idle


# --- a failing step ---


def fail(s: Steps) -> tuple[Rows, list[str]]:
    plan = s.plan()
    ended = s.scheduler.failed(plan, RuntimeError("out of luck"))
    return rows(plan), [request.request_id for request in ended]


def test_after_a_failed_step_each_of_its_requests_runs_alone() -> None:
    s = Steps()
    s.add("a", text(10, 1))
    s.run()
    s.add("b", text(100, 2))
    s.add("c", text(20, 3))
    assert fail(s) == ([("a", 10, 1), ("b", 0, 100), ("c", 0, 20)], [])
    s.add("d", text(20, 4))
    assert s.run() == [("a", 0, 11)]
    assert fail(s) == ([("b", 0, 100)], ["b"])
    assert s.run() == [("c", 0, 20)]
    assert s.run() == [("a", 11, 1), ("c", 20, 1), ("d", 0, 20)]


def test_a_request_that_fails_alone_ends_with_the_error() -> None:
    d = run([Job(text(100, seed)) for seed in range(4)], bad=2)
    assert [r.finish_reason for r in d.requests.values()] == [FinishReason.LENGTH] * 2 + [
        FinishReason.ERROR, FinishReason.LENGTH,
    ]  # fmt: skip
    assert d.requests[2, 0].error == "StepFailed: the step fails"


def test_cached_blocks_survive_a_failed_step() -> None:
    d = Driver(Mix([Job(text(300)), Job(text(300), 3), Job(text(300), 3)], fails=frozenset([6, 7]), cache={
        "num_state_blocks": 16, "num_kv_blocks": 16,
    }))  # fmt: skip
    d.submit(0)
    while not d.scheduler.idle:
        d.step()
        d.steps += 1
    assert d.steps <= 6
    d.steps = 6
    d.submit(1)
    d.submit(2)
    while not d.scheduler.idle:
        d.step()
        d.steps += 1
    d.check()
    assert [d.requests[i, 0].finish_reason for i in (1, 2)] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert d.hit(2) == 256


def test_a_step_that_fails_leaves_the_step_in_flight() -> None:
    s = Steps()
    request = s.add("a", text(10), max_tokens=3)
    first = s.plan()
    s.scheduler.issued(first)
    s.add("b", text(10, 1))
    second = s.plan()
    assert [step.request_id for step in second.steps] == ["a", "b"]
    assert s.scheduler.failed(second, RuntimeError("no")) == []
    assert s.scheduler.schedule() is None  # a's first token has not been read
    s.scheduler.update(first, [[4]])
    assert request.output == [4]
    assert s.run() == [("a", 0, 11)]
    assert s.run() == [("b", 0, 10)]
