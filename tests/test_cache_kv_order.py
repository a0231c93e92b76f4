"""Check the order in which a host engine evicts KV pages that no request uses."""

from __future__ import annotations

import pytest

from mambacache import CacheConfig, PrefixCache
from mambacache.report import Hit

PROMPT = [1] * 140


def cache() -> PrefixCache:
    return PrefixCache(CacheConfig(num_state_blocks=40))


def run(host: PrefixCache, name: str, prompt: list[int], pages: list[int]) -> None:
    """Run a prompt, and release its pages after it."""
    host.add(name, prompt)
    assert isinstance(host.admit(name, kv_tokens=len(prompt)), Hit)
    while (left := host.next_tokens(name, 1 << 16)) > 0 and host.progress(name).computed < len(prompt):
        row = host.allocate(name, left)
        assert row is not None
        rows = host.plan_rows([row])
        host.issued(rows)
        host.accept(rows, {name: [7]} if rows[0].samples else {})
    host.kv_released(name, pages)
    host.free(name, finished=True)


def chat(host: PrefixCache, number: int, pages: list[int]) -> None:
    """Run four turns of a chat; the last releases pages."""
    prompt = [10 + number] * 70
    for turn in range(4):
        run(host, f"{number}, {turn}", prompt, pages if turn == 3 else [])
        prompt = [*prompt, 7, *[9] * 70]


def with_chats(pages: list[int]) -> PrefixCache:
    """Return a cache that saw chats go on and other prompts end; one chat released pages."""
    host = cache()
    for number in range(20):
        chat(host, number, [])
        for single in range(4):
            run(host, f"{number} single {single}", [100 + 4 * number + single] * 140, [])
    chat(host, 20, pages)
    return host


def test_pages_of_a_chat_outlive_newer_pages_of_a_single_prompt() -> None:
    host = with_chats([2, 1])
    host.kv_unused([2, 1])
    run(host, "alone", PROMPT, [4, 3])
    host.kv_unused([4, 3])
    assert host.evict_kv(4) == [4, 3, 2, 1]


def test_among_equal_pages_the_least_recently_used_goes_first() -> None:
    host = cache()
    for number in range(3):
        run(host, str(number), [1 + number] * 140, [2 * number + 2, 2 * number + 1])
        host.kv_unused([2 * number + 2, 2 * number + 1])
    host.kv_used(2)
    host.kv_unused([2])
    assert host.evict_kv(3) == [1, 4, 3]
    assert host.evict_kv(9) == [6, 5, 2]
    assert host.evict_kv(1) == []


def test_a_page_that_is_still_used_takes_the_rank_of_a_request_that_releases_it() -> None:
    """A chat's fourth turn releases page 1 before its other user, which is alone."""
    host = with_chats([1])
    run(host, "alone", PROMPT, [3, 2, 1])
    host.kv_unused([1, 3, 2])
    assert host.evict_kv(3) == [3, 2, 1]


def test_a_prefix_is_evicted_from_its_end_though_later_turns_go_on_less() -> None:
    """Page 1 belongs to second and third turns, page 2 to a second turn."""
    host = cache()
    for number in range(20):
        prompt = [10 + number] * 70
        for turn in range(3):
            run(host, f"{number}, {turn}", prompt, [[], [2, 1], [1]][turn])
            prompt = [*prompt, 7, *[9] * 70]
    assert host._admission.chains.weights[3] < host._admission.chains.weights[2]
    host.kv_unused([2, 1])
    assert host.evict_kv(2) == [2, 1]


def test_a_page_has_no_rank_after_its_eviction_or_loss() -> None:
    host = with_chats([1, 2])
    host.kv_unused([1])
    assert host.evict_kv(1) == [1]
    host.kv_dropped([2])
    run(host, "alone", PROMPT, [3])
    host.kv_unused([1, 2, 3])
    assert host.evict_kv(3) == [1, 2, 3]


def test_a_dropped_page_leaves_the_order() -> None:
    host = cache()
    host.kv_unused([3, 5, 4])
    host.kv_dropped([5, 8])
    host.check()
    assert host.evict_kv(3) == [3, 4]


def test_a_broken_call_keeps_the_pages() -> None:
    host = cache()
    host.kv_unused([3, 5, 4])
    with pytest.raises(KeyboardInterrupt), host._admission:
        raise KeyboardInterrupt
    host.check()
    host.kv_used(5)
    assert host.evict_kv(3) == [3, 4]


def test_a_wrong_page_changes_nothing() -> None:
    host = cache()
    host.kv_unused([3])
    with pytest.raises(ValueError, match="in the order already"):
        host.kv_unused([4, 3])
    with pytest.raises(ValueError, match="in the order already"):
        host.kv_unused([4, 4])
    with pytest.raises(ValueError, match="page 4 is not in the order"):
        host.kv_used(4)
    with pytest.raises(ValueError, match="request 'unknown' is not known"):
        host.kv_released("unknown", [3])
    with pytest.raises(ValueError, match="count"):
        host.evict_kv(-1)
    assert host.evict_kv(9) == [3]
