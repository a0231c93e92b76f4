"""Evict states first after vLLM evicted their KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_utils import get_block_hash

from mambacache.cache.prefix_cache import PrefixCache


class Stored(NamedTuple):
    """A state that was stored, or that waited for its name.

    Attributes:
        ours: its prefix hash.
        theirs: vLLM's hash; None before vLLM hashes the block.
        request: the request that stored it.
        block: number of its last block in the request.
        waited: whether it had no name in an earlier `follow`.
    """

    ours: bytes
    theirs: bytes | None
    request: Any
    block: int
    waited: bool


class HashMap:
    """Maps vLLM's block hashes to prefix hashes and back. Nobody else may take the cache's events.

    Args:
        hashes_of: returns a request's hashes of blocks of `size` tokens.
    """

    def __init__(self, prefix_cache: PrefixCache, hashes_of: Callable[[Any], Sequence[bytes]], size: int) -> None:
        self.ours: dict[bytes, bytes] = {}
        self.theirs: dict[bytes, bytes] = {}
        self.unnamed: dict[bytes, tuple[Any, int]] = {}  # request and block by prefix hash
        self._prefix_cache, self._hashes_of, self._size = prefix_cache, hashes_of, size
        self._last = 0

    def follow(self, requests: Mapping[str, Any]) -> tuple[list[bytes], list[Stored]]:
        """Update the map after states are stored. Return vLLM's hashes of states that are gone, and new states.

        A state of an unknown request gets no entry. After lost events all entries are gone.

        Args:
            requests: all requests that may have stored states since, also requests that end now.
        """
        gone: list[bytes] = []
        waited = set(self.unnamed)
        for event in self._prefix_cache.take_events():
            if event.number != self._last + 1:
                gone += self.ours
                for entries in (self.ours, self.theirs, self.unnamed, waited):
                    entries.clear()
            self._last = event.number
            if event.action == "removed":
                self.unnamed.pop(event.block_hash, None)
                waited.discard(event.block_hash)
                theirs = self.theirs.pop(event.block_hash, None)
                if theirs is not None:
                    self.ours.pop(theirs, None)
                    gone.append(theirs)
            elif (request := requests.get(event.request_id)) is not None:
                self.unnamed[event.block_hash] = request, event.num_tokens // self._size - 1
        return gone, [self._name(ours, ours in waited) for ours in [*self.unnamed]]

    def _name(self, ours: bytes, waited: bool) -> Stored:
        """Enter a new state if vLLM has its hash; with MTP drafts that may cover a token behind the block."""
        request, block = self.unnamed[ours]
        hashes = self._hashes_of(request)
        theirs = hashes[block] if block < len(hashes) else None
        if theirs is not None:
            self.ours[theirs], self.theirs[ours] = ours, theirs
        if theirs is not None or request.is_finished():
            del self.unnamed[ours]
        return Stored(ours, theirs, request, block, waited)


class KVWatch:
    """Tells the cache which states lost their KV. vLLM evicts a prefix from its end, so the last page decides."""

    def __init__(self, prefix_cache: PrefixCache, hashes: HashMap, pool: Any, num_groups: int) -> None:
        self._prefix_cache, self._hashes, self._pool = prefix_cache, hashes, pool
        self._groups = [*range(num_groups)]
        self._emit_removed, pool._emit_block_removed_events = pool._emit_block_removed_events, self._removed
        self._insert, pool._insert_block_hash = pool._insert_block_hash, self._inserted

    def look(self, states: Iterable[Stored]) -> None:
        """Tell the cache of new states without KV, and of states that have their KV at last."""
        for state in states:
            there = state.theirs is not None and self._has(state.theirs)
            if not there or state.waited:
                self._tell(state.ours, there)

    def _tell(self, ours: bytes, there: bool) -> None:
        (self._prefix_cache.kv_stored if there else self._prefix_cache.kv_evicted)([ours])

    def _has(self, theirs: bytes) -> bool:
        return self._pool.get_cached_block(theirs, self._groups) is not None

    def _removed(self, keys: list[bytes]) -> None:
        """Note lost hashes, which other pages may have."""
        self._emit_removed(keys)
        for key in keys:
            theirs = get_block_hash(key)
            ours = self._hashes.ours.get(theirs)
            if ours is not None and not self._has(theirs):
                self._tell(ours, False)

    def _inserted(self, key: bytes, block: Any, num_tokens: int | None) -> None:
        theirs = get_block_hash(key)
        ours = self._hashes.ours.get(theirs)
        lost = ours is not None and not self._has(theirs)
        self._insert(key, block, num_tokens)
        if ours is not None and lost and self._has(theirs):
            self._tell(ours, True)
