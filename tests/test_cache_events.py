"""Check the events of stored and removed blocks, and the order of eviction."""

from __future__ import annotations

import pytest

from cache_calls import allocate, hit, run_step, started
from mambacache.cache.pool import BlockPool
from mambacache.cache.prefix_cache import Hit, PrefixCache
from symbolic import text
from test_cache_surface import ceiling, look, ran
from watched_cache import all_free, num_free, under_way, view, watched


def test_events_are_numbered_without_a_gap() -> None:
    cache = watched(num_state_blocks=3, num_kv_blocks=6)
    events = []
    for i in range(5):
        ran(cache, "a", text(200, i))
        events += cache.take_events()
    cache.reset()
    events += cache.take_events()
    assert [event.number for event in events] == [*range(events[0].number, events[0].number + len(events))]
    held: set[tuple[str, bytes]] = set()
    for event in events:
        assert (event.action == "removed") is ((event.kind, event.block_hash) in held)
        held ^= {(event.kind, event.block_hash)}
    assert not held and len(events) > 30
    stored = [event for event in events if (event.action, event.kind) == ("stored", "state")]
    assert len(stored) == cache.stats.states_stored > 0
    all_free(cache)


def test_a_call_that_raises_leaves_a_gap_in_event_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = watched()
    started(cache, "a", text(200))
    run_step(cache, "a", 100)
    last = cache.take_events()[-1].number
    steps = under_way(cache, "planned", 100)
    with monkeypatch.context() as patch:
        patch.setattr(BlockPool, "commit", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.issued(steps)
    assert num_free(cache) == (16, 16) and not cache.runs("a") and list(cache.tokens("a")) == text(200)
    cache.cancel(steps)
    assert isinstance(cache.admit("a"), Hit)
    run_step(cache, "a", 200, 1)
    assert cache.take_events()[0].number > last + 1
    all_free(cache)


def test_a_state_is_evicted_before_the_pages_that_it_needs() -> None:
    cache = watched(num_kv_blocks=6)
    ran(cache, "a", text(300), checkpoint_at=(64, 128))
    stored = {event.num_tokens: event.block_hash for event in cache.take_events() if event.kind == "state"}
    assert sorted(stored) == [64, 128, 256]
    started(cache, "b", text(200, 1))  # takes four pages, two of them free
    allocate(cache, "b", 200)
    removed = [(event.kind, event.block_hash) for event in cache.take_events()]
    assert removed[:2] == [("state", stored[256]), ("kv", stored[256])] and len(removed) == 3
    assert hit(cache, text(300)) == 128 and cache.stats.states_evicted == 1
    all_free(cache)


def test_a_page_replaced_by_an_exact_page_keeps_its_state() -> None:
    cache = watched()
    started(cache, "a", text(192))
    run_step(cache, "a", 10)
    run_step(cache, "a", 182, 1)
    near = look(cache, text(200))
    assert (near.num_tokens, near.exact) == (192, False)
    ran(cache, "b", text(200), read=False)
    found = look(cache, text(200))
    assert (found.num_tokens, found.exact) == (192, True)
    all_free(cache)


def test_a_row_without_room_evicts_nothing() -> None:
    cache = watched(num_state_blocks=2, num_kv_blocks=6)
    ran(cache, "old", text(190))
    for name, length in (("a", 200), ("b", 3)):
        started(cache, name, text(length, ord(name)))
        run_step(cache, name, min(length, 64))
    cache.take_events()
    before = view(cache)
    assert cache.allocate("a", 136) is None  # evictions would free pages, but there is no state block
    assert view(cache) == before and cache.take_events() == []
    all_free(cache)


# --- the order of eviction ---


def with_three_states() -> tuple[PrefixCache, dict[str, bytes]]:
    """Return a cache for a host that keeps the KV, and the state hashes of requests a, b and c."""
    cache = watched(num_kv_blocks=0, num_state_blocks=5)
    for name in "abc":
        cache.add(name, text(70, ord(name)))
        assert isinstance(cache.admit(name, kv_tokens=0), Hit)
        run_step(cache, name, 70, 1)
        cache.free(name, finished=True)
    return cache, {event.request_id: event.block_hash for event in cache.take_events()}


@pytest.mark.parametrize("held", [False, True])
def test_states_without_host_kv_are_evicted_first(held: bool) -> None:
    cache, hashes = with_three_states()
    if held:
        cache.add("reader", text(70, ord("c")))
        assert isinstance(cache.admit("reader", kv_tokens=70), Hit)
    cache.kv_evicted([bytes(16), hashes["b"]])
    cache.kv_evicted([hashes["c"]])
    if held:
        run_step(cache, "reader", 6, 1)
        cache.free("reader", finished=True)
    assert cache.take_events() == []
    for i in range(4):
        cache.add(str(i), text(20, i))
        assert isinstance(cache.admit(str(i), kv_tokens=0), Hit)
    assert [event.block_hash for event in cache.take_events()] == [hashes[name] for name in "cb"]
    all_free(cache)


def test_a_state_keeps_its_place_if_the_host_has_its_kv_again() -> None:
    cache, hashes = with_three_states()
    cache.kv_evicted([hashes["a"], hashes["c"]])
    cache.kv_stored([bytes(16), hashes["a"], hashes["b"]])
    for i in range(5):
        cache.add(str(i), text(20, i))
        assert isinstance(cache.admit(str(i), kv_tokens=0), Hit)
    assert [event.block_hash for event in cache.take_events()] == [hashes[name] for name in "cba"]
    all_free(cache)


def test_a_prompt_that_is_used_again_outlives_others_in_a_small_record() -> None:
    cache = watched(record_tokens=1000, num_kv_blocks=64)
    for i in (0, 1, 2, 0, 3):
        ran(cache, "a", text(300, i))
    assert [ceiling(look(cache, text(300, i), read=False)) for i in range(4)] == [299, 100, 299, 299]
    all_free(cache)


def test_a_block_that_is_computed_again_outlives_others_among_few_seen_hashes() -> None:
    cache = watched(has_attention=False, num_kv_blocks=0, max_checkpoints=0, max_seen_blocks=2)
    for i in (0, 1, 0, 2):
        ran(cache, "a", text(70, i))
    assert [look(cache, text(70, i)).junction for i in range(3)] == [64, 0, 64]
    all_free(cache)


def test_a_reset_forgets_all() -> None:
    cache = watched()
    ran(cache, "a", text(200))
    hashes = [event.block_hash for event in cache.take_events()]
    started(cache, "b", [*text(150), 40])
    run_step(cache, "b", 151 - cache.progress("b").computed, 1)
    cache.reset()
    found = look(cache, text(200))
    assert (found.num_tokens, found.junction, found.losses, found.waits_for) == (0, 0, {}, None)
    assert {event.block_hash for event in cache.take_events()} >= set(hashes)
    cache.kv_evicted(hashes)
    run_step(cache, "b", 1, 2)  # b goes on, and stores nothing
    assert cache.stats.state_blocks["committed"] == cache.stats.kv_blocks["committed"] == 0
    ran(cache, "c", text(200))
    assert hit(cache, text(200)) == 192
    assert not {event.block_hash for event in cache.take_events()} & set(hashes)
    all_free(cache)


def test_the_cache_tells_ids_progress_and_tokens_of_requests() -> None:
    cache = watched()
    cache.add("b", text(30))
    cache.add("a", text(20, 1))
    assert (cache.request_ids, cache.knows("a"), cache.knows("c"), cache.runs("a")) == (["b", "a"], True, False, False)
    cache.admit("a")
    assert cache.runs("a") and cache.progress("a") == (0, 20, 0, 0)
    steps = under_way(cache, "issued", 20)
    assert cache.progress("a") == (20, 20, 1, 0)
    cache.accept(steps, {"a": [3]})
    assert cache.progress("a") == (20, 20, 0, 20) and list(cache.tokens("a")) == [*text(20, 1), 3]
    cache.free("a", finished=True)
    assert cache.request_ids == ["b"]
    all_free(cache)
