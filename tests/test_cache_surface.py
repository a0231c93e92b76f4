"""Check the rest of the interface: image keys, bounds of a hit, reasons to wait, and reports."""

from __future__ import annotations

from typing import Any

import pytest

from cache_calls import allocate, run_step, started
from mambacache.cache.ledger import Loss, RequestReport
from mambacache.cache.prefix_cache import Hit, PrefixCache, Wait
from symbolic import text
from watched_cache import all_free, num_free, state_blocks, under_way, view, watched

MARKS = (64, 128, 192)


def ran(cache: PrefixCache, name: str, tokens: list[int], **options: Any) -> None:
    """Compute a prompt in one step, sample a token, and free the request."""
    started(cache, name, tokens, **options)
    progress = cache.progress(name)
    run_step(cache, name, progress.prefill_end - progress.computed, 1)
    cache.free(name, finished=True)


def look(cache: PrefixCache, tokens: list[int], *, bounds: dict[str, int] | None = None, **options: Any) -> Hit:
    cache.add("look", tokens, **options)
    found = cache.match("look", **(bounds or {}))
    cache.free("look", finished=False)
    return found


def ceiling(found: Hit) -> int:
    return found.num_tokens + sum(found.losses.values())


# --- keys beside the tokens ---


@pytest.mark.parametrize(
    ("keys", "shared"),
    [
        ([(130, "cat"), (140, "dog")], 299),
        ([(130, "cat"), (140, "cow")], 128),
        ([(131, "cat"), (140, "dog")], 128),
        ([(130, "cat")], 128),
        ([], 128),
        ([(130, "cat"), (140, "dog"), (200, "cow")], 192),
        ([(0, "cow"), (130, "cat"), (140, "dog")], 0),
        ([(63, "cow"), (130, "cat"), (140, "dog")], 0),
        ([(64, "cow"), (130, "cat"), (140, "dog")], 64),
    ],
)
def test_equal_text_with_other_images_shares_the_blocks_before_them(keys: list[tuple[int, str]], shared: int) -> None:
    cache = watched()
    ran(cache, "a", text(300), extra_keys=[(130, "cat"), (140, "dog")], checkpoint_at=MARKS)
    found = look(cache, text(300), extra_keys=keys)
    assert found.num_tokens == shared // 64 * 64 and ceiling(found) == shared
    all_free(cache)


def test_the_key_of_a_block_that_the_answer_fills() -> None:
    cache = watched()
    started(cache, "a", text(126), extra_keys=[(100, "cat")])  # type: ignore[arg-type]
    run_step(cache, "a", 126, 7)
    cache.fork("a", {"b": 8})
    for name, token in (("a", 7), ("b", 8)):
        run_step(cache, name, 1, 9)
        run_step(cache, name, 1, 9)
        turn = [*text(126), token, 9, 9]
        assert [look(cache, turn, extra_keys=[(100, key)]).num_tokens for key in ("cat", "dog")] == [128, 64]
    all_free(cache)


# --- bounds of a hit ---


@pytest.mark.parametrize(
    ("most", "found"), [(None, 192), (1000, 192), (191, 128), (128, 128), (127, 64), (63, 0), (0, 0)]
)
def test_max_tokens_bounds_the_hit(most: int | None, found: int) -> None:
    cache = watched()
    ran(cache, "a", text(256), checkpoint_at=MARKS)
    cache.add("b", text(256))
    for ask in (cache.match, cache.admit):
        answer = ask("b", max_tokens=most)
        assert isinstance(answer, Hit) and answer.num_tokens == found
    assert cache.progress("b").computed == found
    plan = cache.plan([allocate(cache, "b", 256 - found)])
    assert (plan.arrays["kv_slot"] == -1).all()  # all pages are cached, whatever the bound
    cache.issued(plan.steps)
    all_free(cache)


def test_no_request_waits_for_a_prefix_beyond_its_bound() -> None:
    cache = watched()
    started(cache, "a", text(256))
    cache.add("b", text(256))
    assert cache.admit("b", max_tokens=191) == Wait("prefix", "a", 128)
    assert isinstance(cache.admit("b", max_tokens=63), Wait)  # the first wait still holds
    cache.add("c", text(256))
    assert isinstance(cache.admit("c", max_tokens=63), Hit)
    all_free(cache)


def test_exact_is_unknown_where_the_host_keeps_the_kv() -> None:
    cache = watched(num_kv_blocks=0)
    for name in "ab":
        cache.add(name, text(200))
        found = cache.admit(name, kv_tokens=0 if name == "a" else 200)
        assert isinstance(found, Hit) and (found.num_tokens, found.exact) == ((0, True) if name == "a" else (192, None))
        run_step(cache, name, 200 - found.num_tokens, 1)
    alone = watched(num_kv_blocks=0, has_attention=False)
    ran(alone, "a", text(200))
    assert look(alone, text(200)).exact is True
    for each in (cache, alone):
        all_free(each)


# --- reasons to wait ---


def test_reasons_to_wait() -> None:
    cache = watched(num_state_blocks=3, num_kv_blocks=6)
    started(cache, "a", text(200))
    for name, tokens in (("b", text(150)), ("large", text(150, 1)), ("small", text(20, 2)), ("last", text(20, 3))):
        cache.add(name, tokens)
    before = view(cache)[1:]
    assert cache.admit("large") == Wait("no room")  # of pages: the first still lacks four
    assert cache.admit("b") == Wait("prefix", "a", 128)
    assert [cache.waits(name) for name in ("b", "large", "small")] == [True, False, False]
    assert [seen[:3] for seen in view(cache)[1:]] == [seen[:3] for seen in before]
    assert cache.stats.waits == 1 and num_free(cache) == (2, 6)
    steps = under_way(cache, "issued")
    assert not cache.waits("b")
    cache.preempt("a")
    assert cache.admit("a") == Wait("in flight") and not cache.waits("a")
    cache.accept(steps, {"a": [1]})
    for name in ("a", "small"):
        assert isinstance(cache.admit(name), Hit)
        allocate(cache, name, 1)
    assert cache.admit("last") == Wait("no room")  # of states
    all_free(cache)


# --- reports ---


@pytest.mark.parametrize("undo", ["withdraw", "preempt", "cancel"])
def test_an_admission_that_ran_nothing_leaves_no_report(undo: str) -> None:
    cache = watched()
    started(cache, "a", text(200))
    (step,) = cache.plan([allocate(cache, "a", 136)]).steps
    cache.drop(step)
    assert cache.report("a") is None
    steps = under_way(cache, "planned", 136)
    if undo != "cancel":
        getattr(cache, undo)("a")
    cache.cancel(steps)
    assert cache.report("a") is None and cache.stats.requests == 0
    ran(cache, "other", text(150))
    assert isinstance(cache.admit("a"), Hit)
    under_way(cache, "accepted", 72)
    told = cache.report("a")
    assert told == RequestReport(200, 128, 150, {Loss.GRANULARITY: 22}) and cache.stats.requests == 2
    cache.preempt("a")
    assert isinstance(cache.admit("a"), Hit)
    under_way(cache, "accepted", 9)
    assert cache.report("a") is told and cache.stats.requests == 2
    all_free(cache)


def test_nothing_is_told_without_accounting_and_the_same_is_cached() -> None:
    rows: list[Any] = []
    for on in (True, False):
        cache = watched(accounting=on, num_state_blocks=5, num_kv_blocks=8)
        seen: list[Any] = []
        for i, name in enumerate("abcdef"):
            started(cache, name, text(200, i % 2))
            cache.add("waits", text(200, i % 2))
            seen += [type(cache.admit("waits")), cache.progress(name).computed]
            cache.free("waits", finished=False)
            (step,) = run_step(cache, name, 200 - seen[-1], 1).steps
            seen += [step.src, step.dst, dict(step.checkpoints), state_blocks(cache, name)]
            if i % 3 == 2:
                cache.preempt(name)
            cache.free(name, finished=bool(i % 2))
        rows.append([*seen, cache.stats.state_blocks, cache.stats.kv_blocks])
        stats = cache.stats
        told = [stats.requests, stats.prompt_tokens, stats.waits, stats.preemptions, sum(stats.losses.values())]
        assert all(told) if on else not any(told)
        assert bool(cache.take_events()) is on
        found = look(cache, text(250))
        assert found.num_tokens == 192 and bool(found.losses) is on
        all_free(cache)
    assert rows[0] == rows[1]
