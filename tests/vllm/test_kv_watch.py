"""Check the map from vLLM's block hashes to the cache's, on vLLM's own block pool."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
from simulation import HAS_LOOKAHEAD, block_hasher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import Request, RequestStatus

from mambacache.report import CacheEvent
from mambacache.vllm.kv_watch import HashMap, KVWatch


class Host:
    """Hold a block pool of vLLM's beside a cache that notes its messages.

    Attributes:
        told: the last message to the cache for each state, by prefix hash: whether its KV is there.
    """

    def __init__(self, page: int = 64, lookahead: int = 0) -> None:
        init_none_hash(sha256)
        self.hasher = block_hasher(page, lookahead)
        self.pool, self.page = BlockPool(33, True, page), page
        self.told: dict[bytes, bool] = {}
        self.requests: dict[str, Request] = {}
        self._events: list[CacheEvent] = []
        self._number = 0
        states: Any = SimpleNamespace(
            take_events=self._take,
            kv_evicted=lambda hashes: self.told.update(dict.fromkeys(hashes, False)),
            kv_stored=lambda hashes: self.told.update(dict.fromkeys(hashes, True)),
        )
        self.hashes = HashMap(states, attrgetter("block_hashes"), page)
        self.watch = KVWatch(states, self.hashes, self.pool, 1)

    def _take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    def request(self, name: str, num_tokens: int) -> Request:
        params = SamplingParams(max_tokens=9)
        self.requests[name] = Request(name, [1] * num_tokens, params, None, block_hasher=self.hasher)
        return self.requests[name]

    def pages(self, request: Request) -> list[Any]:
        """Take pages for all blocks of a request that vLLM has hashed, and name them."""
        count = len(request.block_hashes)
        blocks = self.pool.get_new_blocks(count)
        self.pool.cache_full_blocks(request, blocks, 0, count, self.page, 0)
        return blocks

    def event(
        self, action: str, block_hash: bytes, num_tokens: int = 0, name: str = "", lost: int = 0, on_host: bool = False
    ) -> None:
        self._number += 1 + lost
        self._events.append(CacheEvent(self._number, action, "state", block_hash, num_tokens, name, on_host))

    def follow(self) -> list[tuple[bytes, bool]]:
        """Return vLLM's hashes of states that are gone, and whether from the host."""
        gone, new = self.hashes.follow(self.requests)
        self.watch.look(new)
        return gone


@pytest.mark.parametrize("page", [64, 16])
def test_the_last_copy_of_a_page_decides(page: int) -> None:
    host = Host(page)
    first, second = (host.pages(host.request(name, 64)) for name in "ab")
    host.event("stored", b"state", 64, "a")
    host.follow()
    assert host.told == {}  # its KV is in the pool
    host.pool.evict_blocks({first[-1].block_id})
    assert host.told == {}
    host.pool.evict_blocks({second[-1].block_id})
    assert host.told == {b"state": False}
    first, second = (host.pages(host.request(name, 64)) for name in "cd")
    assert host.told == {b"state": True}
    host.told.clear()
    host.pool.evict_blocks({first[-1].block_id})
    assert host.told == {}
    host.pool.evict_blocks({second[-1].block_id})
    assert host.told == {b"state": False}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    "lookahead", [0, pytest.param(1, marks=pytest.mark.skipif(not HAS_LOOKAHEAD, reason="vLLM 0.33"))]
)
def test_a_hash_that_does_not_exist_yet_is_awaited(lookahead: int, finished: bool) -> None:
    """The cache may know of a state before vLLM hashes its block: some drafters have hashes cover a token more."""
    host = Host(lookahead=lookahead)
    request = host.request("a", 127 + lookahead)
    assert len(request.block_hashes) == 1
    host.event("stored", b"state", 128, "a")
    host.follow()
    assert host.told == {b"state": False} and not host.hashes.ours
    if finished:
        request.status = RequestStatus.FINISHED_STOPPED
        host.follow()
        assert not host.hashes.unnamed
        return
    request.append_output_token_ids(5)
    pages = host.pages(request)
    host.follow()
    assert host.told == {b"state": True} and not host.hashes.unnamed
    assert host.hashes.ours == {request.block_hashes[1]: b"state"}
    host.pool.evict_blocks({pages[1].block_id})
    assert host.told == {b"state": False}


def test_a_state_without_kv_at_first_goes_first_until_its_page_is_named() -> None:
    host = Host()
    request = host.request("a", 64)
    host.event("stored", b"state", 64, "a")
    host.follow()
    assert host.told == {b"state": False}
    host.pages(request)
    assert host.told == {b"state": True}


def test_an_entry_leaves_with_its_state() -> None:
    host = Host()
    request = host.request("a", 640)
    for i in range(10_000):
        host.event("stored", b"%d" % i, 64 * (i % 10 + 1), "a")
        if i >= 5:
            host.event("removed", b"%d" % (i - 5))
        assert host.follow() == ([(request.block_hashes[(i - 5) % 10], False)] if i >= 5 else [])
        assert len(host.hashes.ours) == len(host.hashes.theirs) == min(i + 1, 5)


def test_lost_events_empty_the_map() -> None:
    host = Host()
    request = host.request("a", 640)
    host.pages(request)
    host.event("stored", b"one", 64, "a")
    host.event("stored", b"late", 704, "a")
    host.follow()
    host.event("stored", b"two", 128, "a", lost=1)
    assert host.follow() == [(request.block_hashes[0], False)]
    assert list(host.hashes.theirs) == [b"two"] and not host.hashes.unnamed


def test_a_state_of_an_unknown_request_gets_no_entry() -> None:
    host = Host()
    host.event("stored", b"state", 64, "nobody")
    host.follow()
    assert not host.hashes.theirs and not host.told
