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
        request: None if the state had its name before.
        block: number of its last block in the request.
        waited: whether it had no name in an earlier `follow`.
    """

    ours: bytes
    theirs: bytes | None
    request: Any
    block: int
    waited: bool
    on_host: bool


class HashMap:
    """Maps vLLM's block hashes to prefix hashes and back. Nobody else may take the cache's events.

    Args:
        hashes_of: returns a request's hashes of blocks of `size` tokens.
    """

    def __init__(self, prefix_cache: PrefixCache, hashes_of: Callable[[Any], Sequence[bytes]], size: int) -> None:
        self.ours: dict[bytes, bytes] = {}
        self.theirs: dict[bytes, bytes] = {}
        self.unnamed: dict[bytes, tuple[Any, int]] = {}  # request and block by prefix hash
        self._held: set[tuple[bytes, bool]] = set()  # prefix hash, whether on the host
        self._told: set[tuple[bytes, bool]] = set()
        self.hashes_of, self.size = hashes_of, size
        self._prefix_cache, self._last = prefix_cache, 0

    def follow(self, requests: Mapping[str, Any]) -> tuple[list[tuple[bytes, bool]], list[Stored]]:
        """Update the map. Return lost states (vLLM's hash, whether the host had it), and new states.

        After lost events all entries are gone.

        Args:
            requests: all that may have stored states since, also requests that end now.
        """
        gone: list[tuple[bytes, bool]] = []
        waited = set(self.unnamed)
        found = dict.fromkeys(self.unnamed)
        for event in self._prefix_cache.take_events():
            ours, place = event.block_hash, (event.block_hash, event.on_host)
            if event.number != self._last + 1:
                gone += [(self.theirs[each], on_host) for each, on_host in self._told]
                for entries in (self.ours, self.theirs, self.unnamed, self._held, self._told, waited, found):
                    entries.clear()
            self._last = event.number
            if event.action == "stored":
                self._held.add(place)
                found[ours] = None
                if ours not in self.theirs and (request := requests.get(event.request_id)) is not None:
                    self.unnamed[ours] = request, event.num_tokens // self.size - 1
                continue
            self._held.discard(place)
            if place in self._told:
                self._told.remove(place)
                gone.append((self.theirs[ours], event.on_host))
            if (ours, not event.on_host) not in self._held:
                self.unnamed.pop(ours, None)
                waited.discard(ours)
                self.ours.pop(self.theirs.pop(ours, b""), None)
        return gone, [state for ours in found for state in self._new(ours, ours in waited)]

    def _new(self, ours: bytes, waited: bool) -> list[Stored]:
        """Return a state for each new place. With MTP drafts its name may cover a token behind the block."""
        request, block = self.unnamed.get(ours, (None, 0))
        if request is not None:
            hashes = self.hashes_of(request)
            if block < len(hashes):
                self.ours[hashes[block]], self.theirs[ours] = ours, hashes[block]
            if block < len(hashes) or request.is_finished():
                del self.unnamed[ours]
        theirs = self.theirs.get(ours)
        if request is None and theirs is None:
            return []
        places = [each for each in ((ours, False), (ours, True)) if each in self._held and each not in self._told]
        if theirs is not None:
            self._told.update(places)
        return [Stored(ours, theirs, request, block, waited, on_host) for _, on_host in places]


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
