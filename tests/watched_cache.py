"""Check a `PrefixCache` after every call, and read all that a host can see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cache_calls import allocate
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig
from mambacache.plan import SequenceStep

Steps = Sequence[SequenceStep]
MOMENTS = ("allocated", "planned", "issued", "accepted")  # of a row
CALLS = (
    "add", "match", "admit", "withdraw", "fork", "preempt", "free", "abandon", "allocate", "drop", "plan_rows", "plan",
    "issued", "accept", "decoded", "cancel", "transfers", "transferred", "invalidate", "kv_evicted", "kv_stored",
    "reset",
)  # fmt: skip


def checked(name: str) -> Callable[..., Any]:
    def call(cache: PrefixCache, *args: Any, **options: Any) -> Any:
        try:
            return getattr(PrefixCache, name)(cache, *args, **options)
        finally:
            cache.check()

    return call


Watched = type("Watched", (PrefixCache,), {name: checked(name) for name in CALLS})


def watched(**options: Any) -> PrefixCache:
    return Watched(CacheConfig(**{"num_state_blocks": 16, "num_kv_blocks": 16, **options}))


def state_blocks(cache: PrefixCache, name: str) -> list[int]:
    """Return the blocks of a running request's cached states by boundary (0: none), then its running block."""
    residency = cache._admission.requests[name].residency
    assert residency is not None
    cached = [cache._admission.pool.lookup(block_hash) or 0 for block_hash in residency.request.chain[1:]]
    return [*cached, residency.state.block if residency.state is not None else 0]


def view(cache: PrefixCache) -> list[Any]:
    """Return all that a host sees: totals, and requests with their tokens, reports, progress and blocks."""
    seen: list[Any] = [cache.stats]
    for name in cache.request_ids:
        row = (cache.progress(name), state_blocks(cache, name)) if cache.runs(name) else None
        seen.append((name, list(cache.tokens(name)), cache.report(name), cache.waits(name), row))
    return seen


@contextmanager
def refused(cache: PrefixCache, error: type[Exception], message: str) -> Iterator[None]:
    """Check that the call raises one sentence and changes nothing."""
    cache.take_events()
    before = view(cache)
    with pytest.raises(error, match=message) as raised:
        yield
    assert "\n" not in str(raised.value)
    assert view(cache) == before and cache.take_events() == []


def all_free(cache: PrefixCache) -> None:
    """Free all requests, reset the cache, and check that every block is free."""
    for name in cache.request_ids:
        cache.free(name, finished=False)
    cache.reset()
    stats, config = cache.stats, cache.config
    assert stats.state_blocks["free"] == config.num_state_blocks
    assert stats.kv_blocks.get("free", 0) == config.num_kv_blocks


def under_way(cache: PrefixCache, moment: str, num_tokens: int = 200, token: int = 1) -> Steps:
    """Take the next row of `a` to `moment`, and return it."""
    steps: Steps = [allocate(cache, "a", num_tokens)]
    if moment != "allocated":
        steps = cache.plan(steps).steps
    if moment in ("issued", "accepted"):
        cache.issued(steps)
    if moment == "accepted":
        cache.accept(steps, {"a": [token]})
    return steps


def num_free(cache: PrefixCache) -> tuple[int, int]:
    return cache.stats.state_blocks["free"], cache.stats.kv_blocks["free"]
