"""Where vLLM evicts the KV of a prefix, the states behind it are evicted first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.report import CacheEvent


class HashMap:
    """Maps vLLM's block hashes to the prefix hashes of cached states, and back.

    `PrefixCache.take_events` feeds it. An entry leaves with its state, so there are never more entries than states.

    Attributes:
        ours: the prefix hash, as in `CacheEvent`, by vLLM's block hash.
        theirs: vLLM's block hash, by the prefix hash.
        unnamed: new states without an entry, by prefix hash: the request that stored the state, and the index of vLLM's
            hash in `request.block_hashes`.
    """

    def __init__(self, hash_block_size: int) -> None:
        self.ours: dict[bytes, bytes] = {}
        self.theirs: dict[bytes, bytes] = {}
        self._hash_block_size = hash_block_size
        self.unnamed: dict[bytes, tuple[Any, int]] = {}
        self._last = 0  # number of the last event

    def follow(self, event: CacheEvent, request: Any) -> None:
        """Follow one event. The map must see every event, in order.

        Args:
            request: vLLM's request that stored the state; None if it is unknown, and then there will be no entry.
        """
        if event.number != self._last + 1:  # events were lost: an entry may belong to a removed state
            for entries in (self.ours, self.theirs, self.unnamed):
                entries.clear()
        self._last = event.number
        if event.action == "removed":
            self.unnamed.pop(event.block_hash, None)
            self.ours.pop(self.theirs.pop(event.block_hash, b""), None)
        elif request is not None:
            self.unnamed[event.block_hash] = request, event.num_tokens // self._hash_block_size - 1

    def name(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Enter the new states, and yield the prefix hash of each with vLLM's hash.

        vLLM's hash is None while it does not exist: with MTP drafts it covers a token behind the block. The state is
        yielded again in the next call, unless its request has ended.
        """
        for ours, (request, index) in [*self.unnamed.items()]:
            named = index < len(request.block_hashes)
            if named or request.is_finished():
                del self.unnamed[ours]
            if named:
                theirs = request.block_hashes[index]
                self.ours[theirs], self.theirs[ours] = ours, theirs
            yield ours, theirs if named else None


class KVWatch:
    """Tells the cache which states have lost their KV, and which states have it again.

    A state is of use while vLLM has the last page of its prefix. vLLM evicts a prefix from its end, so the other pages
    are there, too.

    Args:
        prefix_cache: the cache. Nobody else may take its events.
        pool: vLLM's block pool. Two methods of this object are wrapped.
        num_groups: the number of groups in vLLM's KV cache.
    """

    def __init__(self, prefix_cache: PrefixCache, pool: Any, num_groups: int) -> None:
        self.hashes = HashMap(pool.hash_block_size)
        self._prefix_cache, self._pool, self._groups = prefix_cache, pool, [*range(num_groups)]
        self._emit_removed, pool._emit_block_removed_events = pool._emit_block_removed_events, self._removed
        self._insert, pool._insert_block_hash = pool._insert_block_hash, self._inserted

    def follow(self, requests: Mapping[str, Any]) -> None:
        """Bring the map up to date. Call it after each change that stores states.

        Args:
            requests: vLLM's requests by id, including the requests that end in this step.
        """
        waited = set(self.hashes.unnamed)
        for event in self._prefix_cache.take_events():
            self.hashes.follow(event, requests.get(event.request_id))
        for ours, theirs in self.hashes.name():
            there = theirs is not None and self._has(theirs)
            if not there or ours in waited:
                self._tell(ours, there)

    def _tell(self, ours: bytes, there: bool) -> None:
        (self._prefix_cache.kv_stored if there else self._prefix_cache.kv_evicted)([ours])

    def _has(self, theirs: bytes) -> bool:
        return self._pool.get_cached_block(theirs, self._groups) is not None

    def _removed(self, keys: list[bytes]) -> None:
        """Pages have lost these hashes; other pages may still have them."""
        self._emit_removed(keys)
        for key in keys:
            theirs = get_block_hash(key)
            ours = self.hashes.ours.get(theirs)
            if ours is not None and not self._has(theirs):
                self._tell(ours, False)

    def _inserted(self, key: bytes, block: Any, num_tokens: int | None) -> None:
        """A page gets a hash; another page may have it already."""
        theirs = get_block_hash(key)
        ours = self.hashes.ours.get(theirs)
        lost = ours is not None and not self._has(theirs)
        self._insert(key, block, num_tokens)
        if ours is not None and lost and self._has(theirs):
            self._tell(ours, True)
