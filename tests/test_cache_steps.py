"""Use `PrefixCache` step by step as a host engine does: admissions, stored blocks and readable blocks."""

from __future__ import annotations

from typing import Any

import pytest

from cache_calls import allocate, hit, make, run_step, started, waits_for
from mambacache.plan import PLACEHOLDER
from mambacache.report import Hit, Wait
from symbolic import text

# --- requests ---


def test_add_refuses_an_empty_prompt_and_an_id_in_use() -> None:
    cache = make()
    with pytest.raises(ValueError, match="request 'a' has an empty prompt: give it at least one token"):
        cache.add("a", [])
    cache.add("a", [1])
    with pytest.raises(ValueError, match="request id 'a' is in use: choose another, or free that request first"):
        cache.add("a", [2])
    cache.free("a", finished=False)
    cache.add("a", [2])


def test_a_host_that_keeps_the_kv_must_give_kv_tokens() -> None:
    cache = make(num_kv_blocks=0)
    cache.add("a", text(200))
    for ask in (cache.match, cache.admit):
        with pytest.raises(ValueError, match="kv_tokens is missing: say how many tokens the host's KV covers"):
            ask("a")
    assert cache.admit("a", kv_tokens=0) is not None
    run_step(cache, "a", 200, 1)
    cache.add("b", text(200))
    assert [cache.match("b", kv_tokens=kv).num_tokens for kv in (0, 191, 192, 1000)] == [0, 0, 192, 192]
    assert cache.match("b", kv_tokens=130).junction == 192
    assert "kv_slot" not in cache.plan([allocate(cache, "a", 1)]).arrays


def test_match_changes_nothing() -> None:
    cache = make(num_state_blocks=2)
    started(cache, "a", text(200))
    run_step(cache, "a", 200, 1)
    before = cache.stats.state_blocks, cache.stats.kv_blocks, cache.stats.requests, cache.take_events()
    cache.add("b", text(200))
    assert cache.match("b") == cache.match("b")
    assert before[:3] == (cache.stats.state_blocks, cache.stats.kv_blocks, cache.stats.requests)
    assert cache.take_events() == []


def test_admit_takes_all_or_nothing() -> None:
    cache = make(num_kv_blocks=3, num_state_blocks=4)
    started(cache, "a", text(100))
    cache.add("b", text(100, 1))
    assert cache.admit("b") == Wait("no room")  # the first lacks two of the three pages
    assert cache.stats.kv_blocks == {"free": 3, "writing": 0, "committed": 0, "evictable": 0}
    assert cache.stats.state_blocks["free"] == 3
    cache.free("a", finished=False)
    assert isinstance(cache.admit("b"), Hit)
    with pytest.raises(RuntimeError, match="request 'b' runs already: preempt it before it is admitted again"):
        cache.admit("b")


def test_admit_needs_a_state_block_beside_the_hit() -> None:
    cache = make(num_state_blocks=2)
    started(cache, "a", text(64))
    run_step(cache, "a", 64, 1)
    cache.free("a", finished=True)
    started(cache, "b", text(10, 1))
    cache.add("c", text(70))
    assert cache.match("c").num_tokens == 64
    assert isinstance(cache.admit("c"), Wait)
    assert hit(cache, text(70)) == 64


# --- chunks ---


@pytest.mark.parametrize(
    ("computed", "budget", "expected"),
    [(0, 1000, 300), (0, 300, 300), (0, 299, 256), (0, 100, 64), (0, 64, 64), (0, 63, 63), (0, 1, 1), (10, 54, 54),
     (10, 53, 53), (10, 120, 118), (299, 1, 1), (256, 44, 44), (256, 43, 43)],
)  # fmt: skip
def test_a_chunk_ends_at_the_end_or_on_the_last_boundary_in_reach(computed: int, budget: int, expected: int) -> None:
    cache = make()
    started(cache, "a", text(300))
    if computed:
        run_step(cache, "a", computed)
    assert cache.next_tokens("a", budget) == expected


def test_next_tokens_of_a_decoding_request_is_1() -> None:
    cache = make()
    started(cache, "a", text(30))
    run_step(cache, "a", 30, 1)
    assert cache.next_tokens("a", 100) == 1


# --- blocks are readable once their step is issued ---


@pytest.mark.parametrize("kind", [{}, {"num_kv_blocks": 0, "has_attention": False}])
@pytest.mark.parametrize("num_tokens", [192, 200])
def test_nothing_is_readable_before_its_step_is_issued(num_tokens: int, kind: dict[str, Any]) -> None:
    """Check a checkpoint inside the row, and a dst that ends on a boundary."""
    cache = make(**kind)
    started(cache, "a", text(num_tokens))
    plan = cache.plan([allocate(cache, "a", num_tokens)])
    assert hit(cache, text(200)) == cache.stats.state_blocks["committed"] == 0
    cache.issued(plan.steps)
    assert hit(cache, text(200)) == 192


def test_a_state_is_committed_once_its_tokens_are_known() -> None:
    cache = make()
    said = [*range(2, 10)]
    started(cache, "a", text(62))
    first = cache.plan([allocate(cache, "a", 62)])
    cache.issued(first.steps)
    second = cache.plan([allocate(cache, "a", 1)])  # its token is still being sampled
    assert second.arrays["tokens"].tolist() == [PLACEHOLDER]
    cache.issued(second.steps)
    cache.accept(first.steps, {"a": said[:1]})
    third = cache.plan([allocate(cache, "a", 1)])
    cache.issued(third.steps)  # the state after 64 tokens; the last token is unknown
    assert hit(cache, text(62) + said) == 0
    rotated = cache.plan([allocate(cache, "a", 1)])
    assert rotated.steps[0].src == third.steps[0].dst and not rotated.steps[0].dst
    cache.accept(second.steps, {"a": said[1:2]})
    assert hit(cache, text(62) + said) == 64


def test_a_state_that_waits_for_its_tokens_gives_way_to_a_tail() -> None:
    cache = make(num_state_blocks=3)
    said = [*range(2, 40)]
    started(cache, "b", text(70, 1))
    run_step(cache, "b", 70, 1)
    cache.free("b", finished=True)
    started(cache, "a", text(62))
    plans = []
    for num_tokens in (62, *[1] * 17):
        plans.append(cache.plan([allocate(cache, "a", num_tokens)]))
        cache.issued(plans[-1].steps)
    started(cache, "c", text(5, 2))  # takes the last block besides the tail
    step = allocate(cache, "a", 1)
    assert step.start == 79 and step.src == step.dst == plans[2].steps[0].dst
    plans.append(cache.plan([step]))
    cache.issued(plans[-1].steps)
    for plan, token in zip(plans, said, strict=False):
        cache.accept(plan.steps, {"a": [token]})
    assert hit(cache, text(62) + said) == 0  # the block was written again
    assert hit(cache, text(70, 1)) == 64
    for request_id in "ac":
        cache.free(request_id, finished=True)
    assert cache.stats.state_blocks == {"free": 2, "writing": 0, "committed": 1, "evictable": 1}


def test_a_cancelled_step_commits_nothing_and_takes_the_running_block() -> None:
    cache = make()
    started(cache, "a", text(200))
    run_step(cache, "a", 64)
    cache.cancel(cache.plan([allocate(cache, "a", 136)]).steps)
    assert hit(cache, text(200)) == 64
    assert cache.stats.state_blocks == {"free": 15, "writing": 0, "committed": 1, "evictable": 1}
    found = cache.admit("a")
    assert isinstance(found, Hit) and found.num_tokens == 64


def test_a_row_with_drafts_is_accepted_before_the_second_row_after_it() -> None:
    cache = make(max_draft_tokens=3)
    started(cache, "a", text(62))
    run_step(cache, "a", 62, 5)
    plan = cache.plan([allocate(cache, "a", 1, (6,))])
    cache.issued(plan.steps)
    late = cache.plan([allocate(cache, "a", 1)])
    assert (late.steps[0].start, late.steps[0].unplaced_by) == (63, 1)
    cache.issued(late.steps)
    with pytest.raises(RuntimeError, match="request 'a' has drafts in flight in two steps: accept the first before"):
        cache.allocate("a", 1)
    cache.accept(plan.steps, {"a": [9]})
    allocate(cache, "a", 1)


def test_tokens_of_a_request_that_was_preempted_meanwhile_are_kept() -> None:
    cache = make(max_draft_tokens=3)
    started(cache, "a", text(60))
    run_step(cache, "a", 60, 5)
    plan = cache.plan([allocate(cache, "a", 1, (6, 7, 8))])
    cache.issued(plan.steps)
    cache.preempt("a")
    assert isinstance(cache.admit("a"), Wait)  # until the step's tokens are known
    cache.accept(plan.steps, {"a": [6, 7, 9]})
    assert cache.stats.state_blocks["free"] == cache.stats.kv_blocks["free"] == 16
    assert isinstance(cache.admit("a"), Hit)
    assert cache.plan([allocate(cache, "a", 64)]).arrays["tokens"].tolist() == [*text(60), 5, 6, 7, 9]


def test_a_reset_between_planning_and_issuing_commits_nothing() -> None:
    cache = make()
    started(cache, "a", text(200))
    plan = cache.plan([allocate(cache, "a", 200)])
    assert plan.steps[0].checkpoints
    cache.reset()
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"a": [1]})
    assert cache.take_events() == []
    cache.free("a", finished=True)
    assert cache.stats.state_blocks["free"] == cache.stats.kv_blocks["free"] == 16


def test_after_a_reset_running_requests_finish_and_waiting_requests_start_anew() -> None:
    cache = make()
    started(cache, "a", text(200))
    run_step(cache, "a", 128)
    cache.add("b", text(200))
    assert waits_for(cache, "b") == "a"
    cache.reset()
    assert not cache.waits("b")
    found = cache.admit("b")
    assert isinstance(found, Hit) and (found.num_tokens, found.losses) == (0, {})
    assert run_step(cache, "a", 72, 1).steps[0].start == 128
    assert hit(cache, text(200)) == 0
    run_step(cache, "b", 200, 1)
    assert hit(cache, text(200)) == 192
    cache.preempt("a")
    again = cache.admit("a")
    assert isinstance(again, Hit) and again.num_tokens == 192  # of the new generation


# --- checkpoints ---


def test_two_requests_store_a_position_once() -> None:
    cache = make()
    for name in "ab":
        started(cache, name, text(200), read=False)
    plan = cache.plan([allocate(cache, name, 200) for name in "ab"])
    assert [sorted(step.checkpoints) for step in plan.steps] == [[192], []]


def test_an_exact_state_is_stored_beside_a_near_state_of_the_same_step() -> None:
    cache = make()
    for name in "ab":
        started(cache, name, text(200), read=False)
    run_step(cache, "a", 10)
    plan = cache.plan([allocate(cache, "a", 190), allocate(cache, "b", 200)])
    assert [sorted(step.checkpoints) for step in plan.steps] == [[192], [192]]
    cache.issued(plan.steps)
    cache.add("c", text(200))
    assert cache.match("c").exact


@pytest.mark.parametrize(("first", "second", "again"), [(10, 64, [192]), (10, 20, []), (64, 20, []), (64, 64, [])])
def test_a_cached_state_is_stored_again_only_if_it_was_near(first: int, second: int, again: list[int]) -> None:
    cache = make()
    started(cache, "a", text(200))
    run_step(cache, "a", first)
    run_step(cache, "a", 200 - first, 1)
    started(cache, "b", text(200), read=False)
    run_step(cache, "b", second)
    assert sorted(run_step(cache, "b", 200 - second, 1).steps[0].checkpoints) == again


def test_a_resumed_request_stores_the_tail_of_its_prompt_and_its_own() -> None:
    cache = make()
    started(cache, "a", text(100))
    run_step(cache, "a", 100, 0)
    for i in range(40):
        run_step(cache, "a", 1, i)
    cache.preempt("a")
    while cache._admission.pool.evict():
        pass
    assert isinstance(cache.admit("a"), Hit)
    assert sorted(run_step(cache, "a", 141, 1).steps[0].checkpoints) == [64, 128]


# --- waiting for a prefix ---


def test_a_promised_boundary_is_stored_and_hit() -> None:
    cache = make()
    shared = text(150)
    started(cache, "a", shared + text(100, 1))
    cache.add("b", shared + text(100, 2))
    assert cache.match("b").waits_for == "a"
    assert waits_for(cache, "b") == "a"
    step = run_step(cache, "a", 250, 1).steps[0]
    assert sorted(step.checkpoints) == [128, 192]
    found = cache.admit("b")
    assert isinstance(found, Hit) and found.num_tokens == 128


@pytest.mark.parametrize("options", [{"read": False}, {"salt": "x"}])
def test_a_request_does_not_wait_for_a_prefix_that_it_cannot_use(options: dict) -> None:
    cache = make()
    started(cache, "a", text(200))
    started(cache, "b", text(200), **options)


@pytest.mark.parametrize(("config", "options"), [({}, {"store": False}), ({"max_checkpoints": 0}, {})])
def test_no_request_waits_for_a_request_that_stores_nothing(config: dict, options: dict) -> None:
    cache = make(**config)
    started(cache, "a", text(200), **options)
    started(cache, "b", text(200))


def test_under_strict_reuse_no_request_waits_for_near_states() -> None:
    cache = make(strict_reuse=True)
    started(cache, "a", text(200))
    cache.add("b", text(200))
    assert cache.match("b").waits_for == "a"
    run_step(cache, "a", 10)
    assert cache.match("b").waits_for == "a"
    run_step(cache, "a", 10)
    assert cache.match("b").waits_for is None


def test_a_promise_ends_with_its_residency() -> None:
    cache = make()
    shared = text(150)
    started(cache, "a", shared + text(100, 1))
    cache.add("b", shared + text(100, 2))
    assert isinstance(cache.admit("b"), Wait)
    cache.preempt("a")
    assert isinstance(cache.admit("a"), Hit)
    assert waits_for(cache, "b") == "a"
    assert sorted(run_step(cache, "a", 250, 1).steps[0].checkpoints) == [128, 192]


def test_waiting_ends_when_the_writer_got_no_block() -> None:
    cache = make(num_state_blocks=2)
    shared = text(150)
    started(cache, "a", shared + text(100, 1))
    cache.add("b", shared + text(100, 2))
    assert waits_for(cache, "b") == "a"
    started(cache, "c", text(5, 3))
    assert run_step(cache, "a", 250, 1).steps[0].checkpoints == {}
    cache.free("c", finished=True)
    assert isinstance(cache.admit("b"), Hit)


def test_waiting_ends_when_the_state_is_cached() -> None:
    cache = make()
    shared = text(150)
    started(cache, "a", shared + text(100, 1))
    cache.add("b", shared + text(100, 2))
    assert isinstance(cache.admit("b"), Wait)
    started(cache, "c", shared + text(10, 3), read=False, checkpoint_at=(128,))  # type: ignore[arg-type]
    run_step(cache, "c", 160, 1)
    found = cache.admit("b")
    assert isinstance(found, Hit) and found.num_tokens == 128


def test_waiting_for_the_next_token_of_an_answer() -> None:
    cache = make()
    started(cache, "a", text(63))
    run_step(cache, "a", 63, 7)
    cache.add("b", [*text(63), 7, 8])
    assert waits_for(cache, "b") == "a"
    run_step(cache, "a", 1, 9)
    found = cache.admit("b")
    assert isinstance(found, Hit) and found.num_tokens == 64


def test_waiting_ends_with_the_writer() -> None:
    for end in (lambda c: c.preempt("a"), lambda c: c.free("a", finished=False), lambda c: run_step(c, "a", 192)):
        cache = make()
        started(cache, "a", text(200))
        cache.add("b", text(200))
        assert isinstance(cache.admit("b"), Wait)
        end(cache)
        assert isinstance(cache.admit("b"), Hit)
