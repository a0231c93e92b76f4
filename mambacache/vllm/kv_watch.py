"""Evict states first after vLLM evicted their KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.report import CacheEvent


class HashMap:
    """Maps vLLM's block hashes to prefix hashes and back; `unnamed` maps to a request and index."""

    def __init__(self, hash_block_size: int) -> None:
        self.ours: dict[bytes, bytes] = {}
        self.theirs: dict[bytes, bytes] = {}
        self._hash_block_size = hash_block_size
        self.unnamed: dict[bytes, tuple[Any, int]] = {}
        self._last = 0

    def follow(self, event: CacheEvent, request: Any) -> None:
        """Follow every event, in order; `request` stored the state, if known."""
        if event.number != self._last + 1:  # after lost events entries may be stale
            for entries in (self.ours, self.theirs, self.unnamed):
                entries.clear()
        self._last = event.number
        if event.action == "removed":
            self.unnamed.pop(event.block_hash, None)
            self.ours.pop(self.theirs.pop(event.block_hash, b""), None)
        elif request is not None:
            self.unnamed[event.block_hash] = request, event.num_tokens // self._hash_block_size - 1

    def name(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Enter new states, and yield each prefix hash with vLLM's hash.

        vLLM's may be None at first: with MTP drafts it covers a token behind the block.
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
    """Tells the cache which states lost their KV.

    vLLM evicts a prefix from its end, so the last page decides. Nobody else may take the cache's events.
    """

    def __init__(self, prefix_cache: PrefixCache, pool: Any, num_groups: int) -> None:
        self.hashes = HashMap(pool.hash_block_size)
        self._prefix_cache, self._pool, self._groups = prefix_cache, pool, [*range(num_groups)]
        self._emit_removed, pool._emit_block_removed_events = pool._emit_block_removed_events, self._removed
        self._insert, pool._insert_block_hash = pool._insert_block_hash, self._inserted

    def follow(self, requests: Mapping[str, Any]) -> None:
        """Update the map after states are stored; `requests` include requests that end now."""
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
        """Note lost hashes, which other pages may have."""
        self._emit_removed(keys)
        for key in keys:
            theirs = get_block_hash(key)
            ours = self.hashes.ours.get(theirs)
            if ours is not None and not self._has(theirs):
                self._tell(ours, False)

    def _inserted(self, key: bytes, block: Any, num_tokens: int | None) -> None:
        theirs = get_block_hash(key)
        ours = self.hashes.ours.get(theirs)
        lost = ours is not None and not self._has(theirs)
        self._insert(key, block, num_tokens)
        if ours is not None and lost and self._has(theirs):
            self._tell(ours, True)
