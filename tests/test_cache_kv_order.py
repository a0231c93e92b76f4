"""Check the order of a host engine's evictions of unused KV pages."""

from __future__ import annotations

import time

import pytest

from mambacache import CacheConfig, PrefixCache
from mambacache.cache.kv_order import KVOrder
from mambacache.cache.retention import Needs
from mambacache.report import Hit


def cache() -> PrefixCache:
    return PrefixCache(CacheConfig(num_state_blocks=30))


def run(host: PrefixCache, name: str, prompt: list[int], pages: list[int], page: int = 64) -> bytes:
    """Run a prompt, release its pages of `page` tokens after it, and return the hash of its last state."""
    host.add(name, prompt)
    assert isinstance(host.admit(name, kv_tokens=len(prompt)), Hit)
    while (left := host.next_tokens(name, 1 << 16)) > 0 and host.progress(name).computed < len(prompt):
        row = host.allocate(name, left)
        assert row is not None
        rows = host.plan_rows([row])
        host.issued(rows)
        host.accept(rows, {name: [7]} if rows[0].samples else {})
    host.kv_released(name, {number: page * i for i, number in enumerate(pages, 1)})
    host.free(name, finished=True)
    host.check()
    return host.take_events()[-1].block_hash


def prompt_of(number: int, length: int = 140) -> list[int]:
    return [10 + number] * length


def evict(host: PrefixCache, count: int) -> list[int]:
    pages = host.evict_kv(count)
    host.check()
    return pages


def test_pages_that_no_state_needs_go_first() -> None:
    host = cache()
    run(host, "first", prompt_of(1), [1, 2])
    lost = run(host, "second", prompt_of(2), [3, 4])
    host.kv_unused([2, 1])
    host.kv_unused([4, 3])
    host.kv_evicted([lost])
    assert evict(host, 3) == [4, 3, 2]


def test_pages_are_needed_again_with_their_state() -> None:
    host = cache()
    state = run(host, "first", prompt_of(1), [1, 2])
    host.kv_evicted([state])
    host.kv_unused([2, 1])
    host.kv_stored([state])
    host.kv_unused([5])
    assert evict(host, 1) == [5]


def test_a_page_stays_while_a_second_state_needs_it() -> None:
    host = cache()
    run(host, "short", prompt_of(1, 100), [1])
    longer = run(host, "longer", prompt_of(1, 100) + prompt_of(2), [1, 2, 3])
    run(host, "other", prompt_of(3), [4, 5])
    host.kv_unused([3, 2, 1])
    host.kv_unused([5, 4])
    host.kv_evicted([longer])
    host.kv_unused([6])
    assert evict(host, 3) == [3, 2, 6]


def test_a_page_stays_while_another_prompt_needs_it_that_parts_within_its_block() -> None:
    host = cache()
    first = run(host, "first", [5] * 32 + prompt_of(1, 40), [1, 2], page=32)
    second = run(host, "second", [5] * 32 + prompt_of(2, 40), [3, 4], page=32)
    third = run(host, "third", [5] * 32 + prompt_of(2, 40) + prompt_of(3), [1, 4], page=32)
    host.kv_unused([2, 3, 4, 1])
    host.kv_evicted([first])
    host.kv_unused([9])
    assert evict(host, 2) == [2, 9]
    host.kv_stored([first])
    host.kv_evicted([second, third])
    host.kv_unused([10])
    assert evict(host, 4) == [4, 3, 10, 1]


def test_a_release_takes_no_longer_beside_many_needed_blocks() -> None:
    needs, order = Needs(lambda *_: None, lambda *_: None), KVOrder()
    chain = [number.to_bytes(4, "big") for number in range(100_001)]
    needs.add(chain, 100_000)
    order.follow(needs, lambda frees: False)
    pages = {page: chain[1 + page // 4] for page in range(2000)}
    order.release(pages)
    began = time.perf_counter()
    order.release(pages)
    assert time.perf_counter() - began < 0.2  # a walk over all needed blocks takes 2 s


def test_pages_of_a_chat_outlive_newer_pages_of_a_single_prompt() -> None:
    """Chats go on and other prompts end. If all pages are needed, a state goes, and all its pages with it."""
    host = cache()
    for number in range(30):
        prompt = prompt_of(2 * number, 70)
        for turn in range(3):
            run(host, f"{number}, {turn}", prompt, [1, 2] if (number, turn) == (29, 1) else [])
            prompt = [*prompt, 7, *[9] * 70]
            host.kv_dropped([3, 4])
            single = run(host, f"single {number}, {turn}", prompt_of(1000 + 3 * number + turn), [3, 4])
            if (number, turn) == (29, 1):
                break
    host.kv_unused([2, 1])
    host.kv_unused([4, 3])
    host.take_events()
    assert evict(host, 1) == [4]
    assert [event.block_hash for event in host.take_events()] == [single]
    assert evict(host, 2) == [3, 2]


def test_among_equal_pages_the_least_recently_used_goes_first() -> None:
    host = cache()
    host.kv_unused([2, 1, 4, 3])
    host.kv_used(2)
    host.kv_unused([2])
    assert evict(host, 2) == [1, 4]
    assert evict(host, 9) == [3, 2]
    assert evict(host, 1) == []


def test_pages_of_a_state_in_use_go_last_and_from_their_end() -> None:
    host = cache()
    run(host, "first", prompt_of(1), [1, 2])
    host.kv_unused([2, 1])
    run(host, "other", prompt_of(2), [3, 4])
    host.kv_unused([4, 3])
    host.add("again", prompt_of(1))
    hit = host.admit("again", kv_tokens=140)
    assert isinstance(hit, Hit) and hit.num_tokens == 128
    assert evict(host, 4) == [4, 3, 2, 1]


def test_a_page_has_no_name_after_its_eviction_or_loss() -> None:
    host = cache()
    run(host, "first", prompt_of(1), [1, 2, 3])
    run(host, "second", prompt_of(2), [4, 5])
    host.kv_dropped([2])
    host.kv_unused([3, 1])
    assert evict(host, 1) == [3]  # behind the state
    host.kv_unused([2, 3])
    host.kv_unused([5, 4])
    assert evict(host, 2) == [2, 3]


def test_a_page_forgets_a_prompt_whose_state_is_gone_when_another_releases_it() -> None:
    host = cache()
    first = run(host, "first", [5] * 32 + prompt_of(1, 40), [1, 2], page=32)
    host.kv_evicted([first])
    second = run(host, "second", [5] * 32 + prompt_of(2, 40), [1, 3], page=32)
    host.kv_stored([first])
    host.kv_evicted([second])
    host.kv_unused([1])
    host.kv_unused([4])
    assert evict(host, 2) == [1, 4]


def test_parts_of_a_block_are_needed_with_it() -> None:
    host = cache()
    run(host, "first", prompt_of(1), [1, 2, 3, 4, 5], page=32)
    host.kv_unused([5, 4, 3, 2, 1])
    host.kv_unused([6])
    assert evict(host, 6) == [5, 6, 4, 3, 2, 1]


def test_a_state_whose_pages_are_used_is_not_evicted_for_pages() -> None:
    host = cache()
    run(host, "used", prompt_of(1), [1, 2])
    run(host, "other", prompt_of(2), [3, 4])
    host.kv_unused([4, 3])
    assert evict(host, 3) == [4, 3]
    host.add("again", prompt_of(1))
    hit = host.admit("again", kv_tokens=140)
    assert isinstance(hit, Hit) and hit.num_tokens == 128


def test_a_dropped_page_leaves_the_order() -> None:
    host = cache()
    host.kv_unused([3, 5, 4])
    host.kv_dropped([5, 8])
    assert evict(host, 3) == [3, 4]


def test_a_broken_call_keeps_the_pages() -> None:
    host = cache()
    run(host, "first", prompt_of(1), [1, 2])
    host.kv_unused([2, 1])
    host.kv_unused([3, 5, 4])
    with pytest.raises(KeyboardInterrupt), host._admission:
        raise KeyboardInterrupt
    host.kv_used(5)
    assert evict(host, 9) == [3, 4, 2, 1]


def test_a_wrong_page_changes_nothing() -> None:
    host = cache()
    run(host, "first", prompt_of(1), [1, 2])
    host.add("waits", prompt_of(2))
    host.kv_unused([3])
    with pytest.raises(ValueError, match="in the order already"):
        host.kv_unused([4, 3])
    with pytest.raises(ValueError, match="in the order already"):
        host.kv_unused([4, 4])
    with pytest.raises(ValueError, match="in the order already"):
        host.kv_released("waits", {4: 64, 3: 128})
    with pytest.raises(ValueError, match="the end of a page is 0"):
        host.kv_released("waits", {4: 0})
    with pytest.raises(ValueError, match="give a dict"):
        host.kv_released("waits", [4])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="page 4 is not in the order"):
        host.kv_used(4)
    with pytest.raises(ValueError, match="request 'unknown' is not known"):
        host.kv_released("unknown", {3: 64})
    with pytest.raises(ValueError, match="count"):
        host.evict_kv(-1)
    assert evict(host, 9) == [3]
