"""Check issued steps that fail on the device, and rows that a host lays out itself."""

from __future__ import annotations

import pytest

from cache_calls import allocate, hit, run_step, started
from mambacache.cache.prefix_cache import Hit, Wait
from mambacache.plan import layout
from symbolic import text
from watched_cache import MOMENTS, all_free, refused, under_way, watched


def test_a_failed_step_removes_the_blocks_that_it_committed() -> None:
    cache = watched()
    started(cache, "a", text(300), checkpoint_at=(192,))  # type: ignore[arg-type]
    run_step(cache, "a", 128)
    steps = under_way(cache, "issued", 172)
    started(cache, "b", [*text(250), 40])  # resumes at 192, where the failed step wrote
    started(cache, "c", text(150, 1))
    cache.take_events()
    cache.cancel(steps)
    assert [cache.runs(name) for name in "abc"] == [False, False, True]
    assert hit(cache, text(300)) == 128  # blocks cached before the step stay
    removed = [(event.action, event.kind) for event in cache.take_events()]
    assert sorted(removed) == [("removed", "kv")] * 2 + [("removed", "state")] * 2
    assert cache.stats.preemptions == 2
    found = cache.admit("b")
    assert isinstance(found, Hit) and found.num_tokens == 128
    run_step(cache, "b", 251 - 128, 1)
    assert hit(cache, text(300)) == 192
    all_free(cache)


def test_a_request_that_shares_only_pages_of_a_failed_step_is_preempted() -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, "issued")
    started(cache, "b", [*text(100), 40])  # shares a page, but has no state to resume from
    plan = cache.plan([allocate(cache, "b", 101)])
    assert (plan.arrays["kv_slot"][:64] == -1).all()
    cache.cancel(steps)
    assert not cache.runs("b")
    cache.cancel(plan.steps)
    all_free(cache)


def test_rows_that_resumed_from_a_failed_step_are_void() -> None:
    cache = watched()
    started(cache, "a", text(200))
    failed = under_way(cache, "issued")
    started(cache, "b", text(200))
    after = cache.plan([allocate(cache, "b", 8)]).steps
    cache.issued(after)
    cache.cancel(failed)
    cache.accept(after, {"b": [30]})
    assert list(cache.tokens("b")) == text(200) and isinstance(cache.admit("b"), Hit)
    all_free(cache)


@pytest.mark.parametrize("moment", MOMENTS[1:3])
def test_the_next_row_of_a_step_that_failed_is_void(moment: str) -> None:
    cache = watched()
    started(cache, "a", text(63))
    started(cache, "b", text(20, 1))
    failed = under_way(cache, "issued", 63)
    after = cache.plan([allocate(cache, "a", 1), allocate(cache, "b", 20)]).steps
    if moment == "issued":
        cache.issued(after)
    cache.cancel(failed)
    if moment == "planned":
        cache.issued(after)
    cache.accept(after, {"a": [30], "b": [31]})
    assert list(cache.tokens("a")) == text(63) and list(cache.tokens("b")) == [*text(20, 1), 31]
    assert isinstance(cache.admit("a"), Hit) and hit(cache, text(65)) == 0
    all_free(cache)


def test_a_row_before_a_failed_row_counts() -> None:
    cache = watched()
    started(cache, "a", text(62))
    before, failed = under_way(cache, "issued", 62), under_way(cache, "issued", 1)
    cache.cancel(failed)
    assert cache.admit("a") == Wait("in flight")
    cache.accept(before, {"a": [7]})
    assert list(cache.tokens("a")) == [*text(62), 7] and isinstance(cache.admit("a"), Hit)
    all_free(cache)


# --- rows that a host lays out itself ---


def test_layout_of_planned_rows_equals_plan() -> None:
    plans, rows = [], []
    for with_plan in (True, False):
        cache = watched(max_draft_tokens=2)
        started(cache, "a", text(20, 1))
        run_step(cache, "a", 20, 1)
        started(cache, "b", text(250), checkpoint_at=(64,))  # type: ignore[arg-type]
        steps = [allocate(cache, "b", 250), allocate(cache, "a", 1, (7, 8))]
        if with_plan:
            plans.append(cache.plan(steps))
        else:
            rows = list(cache.plan_rows(steps))
        cache.cancel(steps)
        all_free(cache)
    (plan,) = plans
    assert [row.request_id for row in rows] == ["b", "a"] and sorted(rows[0].checkpoints) == [64, 192]
    assert rows[::-1] == list(plan.steps)
    arrays = layout(rows[::-1], 1)
    assert {name: plan.arrays[name].tolist() for name in arrays} == {name: a.tolist() for name, a in arrays.items()}
    assert set(plan.arrays) - set(arrays) == {
        "tokens", "positions", "kv_slot", "block_table", "block_table_start", "kv_len", "logits_index",
    }  # fmt: skip


@pytest.mark.parametrize("decode_rows", [0, 1, 2])
def test_layout_refuses_rows_in_another_order(decode_rows: int) -> None:
    cache = watched()
    started(cache, "a", text(20))
    run_step(cache, "a", 20, 1)
    started(cache, "b", text(30, 1))
    rows = cache.plan_rows([allocate(cache, "b", 30), allocate(cache, "a", 1)])
    with pytest.raises(ValueError, match=f"decode_rows is {decode_rows}: let all rows for the decode kernels come"):
        layout(rows, decode_rows)
    layout(rows[::-1], 1)
    cache.cancel(rows)
    all_free(cache)


def test_the_last_token_of_a_prompt_may_be_a_decode_row() -> None:
    cache = watched()
    started(cache, "a", text(128))
    with refused(cache, ValueError, "request 'a' runs 2 tokens: decode takes one at a time"):
        cache.allocate("a", 2, decode=True)
    before = run_step(cache, "a", 127).steps[0]
    step = cache.allocate("a", 1, decode=True)
    assert step is not None and not step.prefill and step.samples and step.src == step.dst == before.dst
    plan = cache.plan([step])
    assert (plan.num_decodes, plan.arrays["tokens"].tolist()) == (1, text(128)[-1:])
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"a": [1]})
    cache.add("b", [*text(128), 1])
    found = cache.match("b")
    assert (found.num_tokens, found.exact) == (128, False)
    all_free(cache)


def test_a_token_inside_a_prompt_may_be_a_decode_row() -> None:
    """A host has one budget token left for a prompt, and orders rows of one token first."""
    cache = watched()
    started(cache, "a", text(200))
    for decode in (True, True, False):
        step = cache.allocate("a", 1 if decode else 126, decode=decode)
        assert step is not None and step.prefill is not decode and not step.samples
        plan = cache.plan([step])
        cache.issued(plan.steps)
        cache.accept(plan.steps, {})
    cache.add("b", text(200))
    found = cache.match("b")
    assert (found.num_tokens, found.exact) == (128, False)
    all_free(cache)
