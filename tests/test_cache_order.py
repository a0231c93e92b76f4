"""Make calls in any order: residencies end while their row is in flight, and refused calls change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache_calls import allocate, hit, run_step, started
from mambacache.cache.prefix_cache import Hit, PrefixCache, Wait
from symbolic import text
from watched_cache import MOMENTS, Steps, all_free, num_free, refused, under_way, view, watched

ENDS = [
    pytest.param(lambda cache: cache.free("a", finished=False), id="abort"),
    pytest.param(lambda cache: cache.preempt("a"), id="preempt"),
    pytest.param(lambda cache: cache.abandon(), id="abandon"),
]


# --- a residency ends while its row is in flight ---


@pytest.mark.parametrize("moment", MOMENTS[:3])
def test_an_old_row_gives_nothing_to_a_new_request_of_its_name(moment: str) -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, moment)
    cache.free("a", finished=False)
    started(cache, "a", text(70, 1))
    before = view(cache)[1:]
    if moment == "planned":
        cache.issued(steps)
    cache.accept(steps, {"a": [9]})
    cache.cancel(steps)
    assert view(cache)[1:] == before
    assert run_step(cache, "a", 70, 5).arrays["tokens"].tolist() == text(70, 1)
    assert list(cache.tokens("a")) == [*text(70, 1), 5]
    all_free(cache)


@pytest.mark.parametrize("end", ENDS)
def test_a_residency_that_ends_before_its_row_is_planned_frees_its_blocks(end: Callable) -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, "allocated")
    end(cache)
    assert num_free(cache) == (16, 16)
    with refused(cache, RuntimeError, "was preempted or freed after its row was allocated: plan the step without it"):
        cache.plan(steps)
    if cache.knows("a"):
        assert isinstance(cache.admit("a"), Hit)
    all_free(cache)


@pytest.mark.parametrize("way_out", ["issued", "cancel", "drop"])
@pytest.mark.parametrize("end", ENDS[:2])
def test_a_residency_that_ends_before_its_row_is_issued_frees_blocks_with_the_row(end: Callable, way_out: str) -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, "planned")
    held = num_free(cache)
    end(cache)
    assert num_free(cache) == held < (16, 16)  # the step may still be issued, and would write there
    if way_out == "drop":
        cache.drop(steps[0])
    else:
        getattr(cache, way_out)(steps)
    assert num_free(cache) == (16, 16)
    all_free(cache)


@pytest.mark.parametrize("end", ENDS)
def test_a_residency_that_ends_after_its_row_is_issued_keeps_only_cached_blocks(end: Callable) -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, "issued")
    end(cache)
    assert num_free(cache) == (15, 13)
    cache.accept(steps, {"a": [1]})
    assert num_free(cache) == (15, 13) and hit(cache, text(200)) == 192
    all_free(cache)


def test_abandon_drops_planned_rows() -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, "planned")
    cache.abandon()
    assert num_free(cache) == (16, 16) and not cache.runs("a")
    cache.issued(steps)
    cache.accept(steps, {"a": [1]})
    assert list(cache.tokens("a")) == text(200) and hit(cache, text(200)) == 0
    all_free(cache)


@pytest.mark.parametrize("moment", MOMENTS[1:3])
def test_a_preempted_request_waits_for_its_tokens_in_flight(moment: str) -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, moment)
    cache.preempt("a")
    assert cache.admit("a") == Wait("in flight")
    if moment == "planned":
        cache.issued(steps)
        assert cache.admit("a") == Wait("in flight")
    cache.accept(steps, {"a": [7]})
    found = cache.admit("a")
    assert isinstance(found, Hit) and found.num_tokens == (192 if moment == "issued" else 0)
    assert run_step(cache, "a", 201 - found.num_tokens, 8).arrays["tokens"].tolist()[-2:] == [text(200)[-1], 7]
    all_free(cache)


def test_a_row_planned_before_its_request_stopped_frees_its_blocks() -> None:
    cache = watched()
    started(cache, "a", text(62))
    last = under_way(cache, "issued", 62)
    after = under_way(cache, "planned", 1)
    cache.accept(last, {"a": [7]})
    held = num_free(cache)
    cache.free("a", finished=True)
    assert num_free(cache) == held < (16, 16)
    cache.issued(after)
    assert num_free(cache) == (16, 16)
    cache.accept(after, {"a": [8]})
    all_free(cache)


def test_aborts_between_plan_and_issued_cost_no_block_and_no_checkpoint() -> None:
    cache = watched(max_checkpoints=3)
    for way_out in (cache.issued, cache.cancel, cache.issued, cache.cancel, cache.issued):
        started(cache, "a", text(250), checkpoint_at=(64, 128))  # type: ignore[arg-type]
        steps = under_way(cache, "planned", 250)
        assert sorted(steps[0].checkpoints) == [64, 128, 192]
        cache.free("a", finished=False)
        way_out(steps)
        assert num_free(cache) == (16, 16)
    all_free(cache)


def test_a_dropped_row_leaves_its_request_as_it_was() -> None:
    cache = watched()
    started(cache, "a", text(200))
    run_step(cache, "a", 70)
    for moment in MOMENTS[:2]:
        before = view(cache)
        (step,) = under_way(cache, moment, 130)
        cache.drop(step)
        assert view(cache) == before
        with refused(cache, RuntimeError, "the row of request 'a' has ended: accept, cancel or drop a row once"):
            cache.issued([step])
    run_step(cache, "a", 130, 1)
    assert hit(cache, text(200)) == 192
    all_free(cache)


@pytest.mark.parametrize("call", ["issued", "cancel", "drop", "accept"])
@pytest.mark.parametrize("again", [False, True])
def test_rows_of_ended_residencies_are_ignored(call: str, again: bool) -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, "accepted")
    cache.preempt("a")
    if again:
        assert isinstance(cache.admit("a"), Hit)
    before = view(cache)
    {"drop": lambda: cache.drop(steps[0]), "accept": lambda: cache.accept(steps, {"a": [3]})}.get(
        call, lambda: getattr(cache, call)(steps)
    )()
    assert view(cache) == before
    all_free(cache)


def test_every_admission_begins_its_own_residency() -> None:
    cache = watched()
    cache.add("a", text(30))
    residencies: list[int] = []
    for end in (cache.withdraw, cache.preempt, lambda name: cache.free(name, finished=False)):
        assert isinstance(cache.admit("a"), Hit)
        residencies.append(allocate(cache, "a", 30).residency)
        end("a")
    started(cache, "a", text(30))
    residencies += [step.residency for step in run_step(cache, "a", 30, 1).steps]
    cache.fork("a", {"b": 2})
    residencies += [allocate(cache, name, 1).residency for name in "ba"]
    assert len(set(residencies)) == 5 and residencies[3] == residencies[5]
    all_free(cache)


# --- calls out of order are refused ---


@pytest.mark.parametrize(
    ("moment", "call", "message"),
    [
        ("allocated", lambda c, s: c.allocate("a", 1), "request 'a' has a row that is not issued: issue, drop or"),
        ("allocated", lambda c, s: c.issued(s), "the row of request 'a' was not planned: plan it first"),
        ("allocated", lambda c, s: c.accept(s, {"a": [1]}), "the row of request 'a' was not issued: issue it first"),
        ("planned", lambda c, s: c.allocate("a", 1), "request 'a' has a row that is not issued: issue, drop or"),
        ("planned", lambda c, s: c.plan(s), "the row of request 'a' was planned already: plan a row once"),
        ("planned", lambda c, s: c.plan_rows(s), "the row of request 'a' was planned already: plan a row once"),
        ("planned", lambda c, s: c.accept(s, {"a": [1]}), "the row of request 'a' was not issued: issue it first"),
        ("issued", lambda c, s: c.plan(s), "the row of request 'a' was planned already: plan a row once"),
        ("issued", lambda c, s: c.issued(s), "the row of request 'a' was issued already: issue a row once"),
        ("issued", lambda c, s: c.drop(s[0]), "the row of request 'a' was issued: accept or cancel it"),
        ("issued", lambda c, s: c.withdraw("a"), "request 'a' has run since its admission: preempt it instead"),
        ("accepted", lambda c, s: c.withdraw("a"), "request 'a' has run since its admission: preempt it instead"),
        *[
            ("accepted", call, "the row of request 'a' has ended: accept, cancel or drop a row once")
            for call in (
                lambda c, s: c.plan(s), lambda c, s: c.issued(s), lambda c, s: c.accept(s, {"a": [1]}),
                lambda c, s: c.cancel(s), lambda c, s: c.drop(s[0]),
            )
        ],
        *[
            (moment, lambda c, s: c.admit("a"), "request 'a' runs already: preempt it before it is admitted again")
            for moment in MOMENTS
        ],
        *[
            (moment, lambda c, s: c.fork("a", {"b": 1}), "request 'a' has not just ended its prompt: fork it after its")
            for moment in MOMENTS[:3]
        ],
    ],
)  # fmt: skip
def test_misordered_calls_are_refused(moment: str, call: Callable[[PrefixCache, Steps], object], message: str) -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, moment)
    with refused(cache, RuntimeError, message):
        call(cache, steps)
    all_free_after(cache, steps)


@pytest.mark.parametrize(
    ("moment", "call"),
    [
        ("allocated", lambda c, s: c.plan(s)),
        ("allocated", lambda c, s: c.plan_rows(s)),
        ("planned", lambda c, s: c.issued(s)),
        ("issued", lambda c, s: c.accept(s, {"a": [1]})),
        ("issued", lambda c, s: c.cancel(s)),
    ],
)
def test_a_row_given_twice_is_refused(moment: str, call: Callable[[PrefixCache, Steps], object]) -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, moment)
    with refused(cache, ValueError, "a row is given twice: give each row of a step once"):
        call(cache, [*steps, *steps])
    all_free_after(cache, steps)


def all_free_after(cache: PrefixCache, steps: Steps) -> None:
    cache.free("a", finished=False)
    cache.cancel(steps)
    all_free(cache)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.progress("a"), lambda c: c.next_tokens("a", 64), lambda c: c.allocate("a", 1),
        lambda c: c.preempt("a"), lambda c: c.withdraw("a"),
    ],
)  # fmt: skip
def test_calls_for_a_request_that_does_not_run_are_refused(call: Callable[[PrefixCache], object]) -> None:
    cache = watched()
    cache.add("a", text(200))
    with refused(cache, RuntimeError, "request 'a' does not run: admit it first"):
        call(cache)
    all_free(cache)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_late_fork_is_refused(moment: str) -> None:
    cache = watched()
    started(cache, "a", text(200))
    run_step(cache, "a", 200, 1)
    steps = under_way(cache, moment, 1)
    late = "has a row under way: fork it before" if moment in MOMENTS[:2] else "has not just ended its prompt: fork it"
    with refused(cache, RuntimeError, f"request 'a' {late}"):
        cache.fork("a", {"b": 2})
    all_free_after(cache, steps)


@pytest.mark.parametrize("taken", ["a", "other"])
def test_a_fork_into_an_id_in_use_is_refused(taken: str) -> None:
    cache = watched()
    started(cache, "other", text(20, 1))
    started(cache, "a", text(200))
    run_step(cache, "a", 200, 1)
    with refused(cache, ValueError, f"request id '{taken}' is in use: choose another, or free that request first"):
        cache.fork("a", {"b": 2, taken: 3})
    assert cache.fork("a", {"b": 2}) == ["b"]
    all_free(cache)


def test_rows_of_a_request_are_accepted_in_their_order() -> None:
    cache = watched()
    started(cache, "a", text(62))
    first, second = under_way(cache, "issued", 62), under_way(cache, "issued", 1)
    with refused(cache, RuntimeError, "an earlier row of request 'a' was not accepted: accept it first"):
        cache.accept(second, {"a": [2]})
    cache.accept(first, {})  # the host keeps the token back
    with refused(cache, ValueError, "request 'a' lacks the tokens before these: accept them first"):
        cache.accept(second, {"a": [2]})
    all_free(cache)


def test_a_request_without_a_next_token_runs_no_further() -> None:
    cache = watched()
    started(cache, "a", text(62))
    steps = under_way(cache, "issued", 62)
    cache.accept(steps, {})
    with refused(cache, RuntimeError, "request 'a' has no next token: accept what its last row gave first"):
        cache.allocate("a", 1)
    all_free(cache)
