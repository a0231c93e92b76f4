"""Check steps that overlap, end early or fail late, and the order of admission."""

from __future__ import annotations

from typing import Any

import pytest

from cache_calls import hit
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.plan import StepPlan
from mambacache.scheduler.request import FinishReason
from symbolic import text
from symbolic_driver import Job, run
from test_scheduler_steps import Steps, rows
from watched_cache import all_free, num_free


def issue(s: Steps) -> StepPlan:
    plan = s.plan()
    s.scheduler.issued(plan)
    s.cache.check()
    return plan


def read(s: Steps, plan: StepPlan, token: int) -> list[str]:
    """Read a step's tokens, and return the ids of the requests that changed."""
    told = s.scheduler.update(plan, [[token] * step.samples for step in plan.steps])
    s.cache.check()
    return [request.request_id for request in told]


def fail(s: Steps, plan: StepPlan) -> None:
    assert s.scheduler.failed(plan, RuntimeError("the device failed")) == []
    s.cache.check()


def finish(s: Steps) -> None:
    """Run all that is left, and check that every block is free."""
    while not s.scheduler.idle:
        s.run()
        s.cache.check()
    all_free(s.cache)


# --- steps that overlap ---


def test_a_request_that_stops_after_its_next_row_was_planned_gets_no_more_tokens() -> None:
    s = Steps({"num_state_blocks": 4, "num_kv_blocks": 4})
    a, b = s.add("a", text(62)), s.add("b", text(20, 1), max_tokens=3)
    a.end_tokens = frozenset([7])
    first, second = issue(s), s.plan()
    assert rows(second) == [("a", 62, 1), ("b", 20, 1)]
    assert read(s, first, 7) == ["a", "b"]
    assert a.finish_reason is FinishReason.STOP and set(s.scheduler.requests) == {"b"}
    assert num_free(s.cache) == (2, 2)  # its row may still be issued
    s.scheduler.issued(second)
    assert num_free(s.cache) == (3, 3)
    assert read(s, second, 8) == ["b"]
    finish(s)
    assert (a.output, b.output) == ([7], [7, 8, 0])


@pytest.mark.parametrize("moment", ["planned", "issued"])
def test_a_new_request_of_an_aborted_name_gets_none_of_its_tokens(moment: str) -> None:
    s = Steps()
    s.add("a", text(100), max_tokens=3)
    s.add("b", text(20, 1), max_tokens=3)
    old = s.plan()
    if moment == "issued":
        s.scheduler.issued(old)
    s.scheduler.abort("a")
    again = s.add("a", text(90, 2), max_tokens=3)
    if moment == "planned":
        s.scheduler.issued(old)
    assert read(s, old, 9) == ["b"] and again.output == []
    assert s.run() == [("b", 20, 1), ("a", 0, 90)]
    finish(s)
    assert again.output == [0, 0, 0] and again.finish_reason is FinishReason.LENGTH


def test_aborts_between_schedule_and_issued_cost_no_block() -> None:
    s = Steps({"num_state_blocks": 16, "num_kv_blocks": 16, "max_checkpoints": 2})
    for _ in range(5):
        s.add("a", text(200), checkpoint_at=(64,))
        plan = s.plan()
        assert sorted(plan.steps[0].checkpoints) == [64, 192]
        s.scheduler.abort("a")
        s.scheduler.issued(plan)
        assert read(s, plan, 1) == [] and num_free(s.cache) == (16, 16)
    all_free(s.cache)


@pytest.mark.parametrize(
    ("call", "nth"), [("progress", 1), ("progress", 3), ("admit", 1), ("next_tokens", 2), ("allocate", 2), ("plan", 1)]
)
def test_a_schedule_that_raises_changes_no_answer(call: str, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Steps()
    s.add("old", text(150, 4), max_tokens=1)
    s.run()
    requests = [s.add("a", text(20, 1), max_tokens=4)]
    s.run()
    requests += [s.add(name, text(70, ord(name)), max_tokens=4) for name in "bc"]
    left, whole = [nth], getattr(PrefixCache, call)

    def broken(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return whole(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, call, broken)
        with pytest.raises(KeyboardInterrupt):
            s.scheduler.schedule()
    s.cache.check()
    assert s.run() == [("a", 0, 21), ("b", 0, 70), ("c", 0, 70)]
    assert hit(s.cache, text(150, 4)) == 128  # nothing was torn: cached blocks stay
    finish(s)
    assert [request.output for request in requests] == [[0] * 4] * 3


# --- a step that fails after the next one was issued ---


def test_tokens_that_follow_a_failed_step_do_not_count() -> None:
    s = Steps()
    a, b = s.add("a", text(10), max_tokens=3), s.add("b", text(10, 1), max_tokens=3)
    first, second = issue(s), issue(s)
    assert rows(second) == [("a", 10, 1), ("b", 10, 1)]
    fail(s, first)
    assert read(s, second, 9) == [] and a.output == b.output == []
    assert [s.run(), s.run()] == [[("a", 0, 10)], [("b", 0, 10)]]
    finish(s)
    assert a.output == b.output == [0, 0, 0]


def test_a_request_that_resumed_from_a_failed_step_is_computed_again() -> None:
    s = Steps(max_num_batched_tokens=300)
    a, other = s.add("a", text(200), max_tokens=3), s.add("b", text(30, 1), max_tokens=3)
    first = issue(s)
    reader = s.add("c", [*text(195), 40], max_tokens=3)  # finds a state
    shared = s.add("d", [*text(100), 40], max_tokens=3)  # finds only a page
    second = issue(s)
    assert rows(second)[2:] == [("c", 192, 4), ("d", 0, 101)]
    fail(s, first)
    read(s, second, 9)
    assert a.output == other.output == reader.output == shared.output == []
    finish(s)
    assert all(request.output == [0, 0, 0] for request in (a, other, reader, shared))


@pytest.mark.parametrize("overlap", [False, True])
def test_only_a_request_that_fails_alone_ends(overlap: bool) -> None:
    s = Steps()
    a = s.add("a", text(10), max_tokens=3)
    b = s.add("b", text(10, 1), max_tokens=1)
    first = issue(s)
    second = issue(s)
    assert rows(second) == [("a", 10, 1)]  # alone, after a step with b that fails
    fail(s, first)
    later = issue(s) if overlap else None
    fail(s, second)
    assert a.finish_reason is b.finish_reason is None
    if later is not None:
        assert rows(later) == [("a", 0, 10)] and read(s, later, 0) == ["a"]
    finish(s)
    assert (a.output, b.output) == ([0, 0, 0], [0])


# --- the order of admission ---


def test_no_request_is_admitted_in_a_step_that_preempted() -> None:
    s = Steps({"num_kv_blocks": 3}, max_num_seqs=2)
    for name, length in (("a", 63), ("b", 100), ("c", 10)):
        s.add(name, text(length, ord(name)), max_tokens=4)
    plans = [issue(s) for _ in range(2)]
    assert [rows(plan) for plan in plans] == [[("a", 0, 63), ("b", 0, 100)], [("a", 63, 1), ("b", 100, 1)]]
    plans.append(issue(s))
    assert s.cache.stats.preemptions == 1  # b, for a page of a: c could have a page too
    assert rows(plans[-1]) == [("a", 64, 1)]
    for plan in plans:
        read(s, plan, 0)
    assert [row[0] for row in s.run()] == ["a"]  # b came before c, and lacks a page
    finish(s)


@pytest.mark.parametrize("budget", [512, 2048, 8192])
def test_all_but_the_first_of_many_prompts_hit_their_shared_prefix(budget: int) -> None:
    jobs = [Job(text(1600) + text(600, seed), 1) for seed in range(64)]
    options = {"num_state_blocks": 200, "num_kv_blocks": 64 * 35, "max_num_seqs": 64}
    d = run(jobs, budget=budget, **options)
    assert [d.hit(i) for i in range(64)] == [0] + [1600] * 63
    assert d.tokens_computed == 2200 + 63 * 600 and d.cache.stats.preemptions == 0


@pytest.mark.parametrize("most", [2, 4, 8])
def test_a_bounded_number_of_requests_overtakes_a_reader(most: int) -> None:
    limits = {"max_num_batched_tokens": 100, "max_num_seqs": most, "long_prefill_token_threshold": 64}
    s = Steps({"num_state_blocks": 4}, **limits)
    s.add("writer", text(1300), max_tokens=1)
    s.add("reader", [*text(1280), 40], max_tokens=1)
    for i in range(60):
        s.add(str(i), text(10, 1 + i % 39), max_tokens=1)
    admitted: list[str] = []
    while not s.scheduler.idle:
        admitted += [row[0] for row in s.run() if row[0] not in admitted]
        s.cache.check()
    ahead = admitted.index("reader") - 1  # requests that came after the reader
    assert ahead <= most, f"{ahead} requests overtook a waiting request, and {most} run at a time"
    assert ahead > 0 and len(admitted) == 62
    assert s.scheduler.requests == {} and admitted[0] == "writer"
    all_free(s.cache)
