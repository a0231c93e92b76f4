"""Announce states in vLLM's KV events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from mambacache.plan import CHUNK
from mambacache.vllm.kv_watch import HashMap, Stored


class ChunkHashes:
    """Hashes blocks of 64 tokens as vLLM does, where vLLM's own block is a page that holds a whole request."""

    def __init__(self, algorithm: str) -> None:
        self._hash = get_request_block_hasher(CHUNK, get_hash_fn_by_name(algorithm))
        self._hashes: WeakKeyDictionary[Any, list[bytes]] = WeakKeyDictionary()

    def __call__(self, request: Any) -> list[bytes]:
        """Return a request's hashes."""
        hashes = self._hashes.setdefault(request, [])
        own, request.block_hashes = request.block_hashes, hashes  # vLLM's function goes on from these
        try:
            hashes += self._hash(request)
        finally:
            request.block_hashes = own
        return hashes


class StateEvents:
    """Announces states as one more group of kind mamba, each by the hash of the prefix that it ends.

    Events stay in the block pool's queue until `take`: vLLM publishes amid `update_from_output`, before a step's states
    are stored.

    Args:
        manager: vLLM's KV cache manager.
        hashes: knows vLLM's hashes of states.
        has_attention: whether there are pages to report.
        alone: whether consumers know one group. Pages are then announced up to the deepest state, and no states.
    """

    def __init__(self, manager: Any, hashes: HashMap, *, has_attention: bool, alone: bool) -> None:
        self._pool, self._hashes, self._size = manager.block_pool, hashes, hashes.size
        self._group = len(manager.kv_cache_event_metadata)
        self._page_groups = range(self._group if has_attention else 0)
        self._usable = UsablePages(self._group) if alone else None
        manager.kv_cache_event_metadata += (("mamba", None),)
        self._metadata = manager.kv_cache_event_metadata
        self._take, manager.take_events = manager.take_events, list  # vLLM finds no events
        manager.coordinator.emit_cached_block_events = _report_nothing  # `report` knows the hit
        self._reports: list[BlockStored] = []
        self._states: dict[bytes, BlockStored] = {}  # by vLLM's hash

    def note(self, gone: Iterable[tuple[bytes, bool]], new: Iterable[Stored]) -> None:
        """Announce what became of states."""
        queue = self._pool.kv_event_queue
        for theirs, on_host in gone:
            queue.append(BlockRemoved([maybe_convert_block_hash(theirs)], self._medium(on_host), self._group))
            if theirs not in self._hashes.ours:
                self._states.pop(theirs, None)
        for state in new:
            if state.theirs is None:
                continue
            if state.request is not None:
                self._states[state.theirs] = self._stored(state.request, state.block, state.block + 1, self._group)
            event = copy(self._states[state.theirs])
            event.medium = self._medium(state.on_host)
            queue.append(event)

    def _medium(self, on_host: bool) -> str:
        return MEDIUM_CPU if on_host else self._pool.medium

    def forget(self) -> None:
        """Forget all states."""
        self._states.clear()

    def report(self, request: Any, hit: int) -> None:
        """Announce a hit of `hit` tokens, once, if the request asks for that."""
        if getattr(request, "kv_cache_report_mode", None) != "full":
            return
        request.kv_cache_report_mode = "incremental"
        depth = hit // self._size
        if depth:
            self._reports += [self._stored(request, 0, depth, group) for group in self._page_groups]
            if self._usable is None:
                self._reports.append(self._stored(request, depth - 1, depth, self._group))

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        events = self._take()
        if self._usable is not None:
            events = self._usable.only(events)
        events += self._reports
        self._reports = []
        return events

    def _stored(self, request: Any, first: int, end: int, group: int) -> BlockStored:
        hashes, size, lora = self._hashes.hashes_of(request), self._size, request.lora_request
        pool = self._pool if self._page_groups else None  # `ChunkHashes` cover no token behind a block
        keys_of = getattr(pool, "_generate_event_extra_keys", generate_block_hash_extra_keys)  # vLLM 0.33
        keys = [keys_of(request, start, start + size, 0)[0] for start in range(first * size, end * size, size)]
        event = BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes[first:end]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=request.all_token_ids[first * size : end * size],
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=self._pool.medium,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(keys),
            group_idx=group,
            kv_cache_spec_kind=self._metadata[group][0],
            session_id=request.session_id,
        )
        if ahead := getattr(pool, "num_hash_lookahead_tokens", 0):
            ends = range((first + 1) * size, (end + 1) * size, size)
            event.lookahead_token_ids = [request.all_token_ids[each : each + ahead] for each in ends]
        return event


def _report_nothing(request: Any, computed_blocks: Any) -> None:
    """Stand for vLLM's report, which it makes in each step a request waits, and of hits that no state follows."""


class UsablePages:
    """Leaves out pages behind the deepest state, and states.

    A page is usable if it is cached, and a state ends where it ends, or a usable page follows it. Each is announced
    once, whatever its copies.

    Args:
        state_group: group of states in events.
    """

    def __init__(self, state_group: int) -> None:
        self._state_group = state_group
        self._clear()

    def _clear(self) -> None:
        self._pages: dict[Any, BlockStored] = {}
        self._copies: Counter[Any] = Counter()
        self._uses: Counter[Any] = Counter()  # copies of its state, and usable pages that follow it

    def only(self, events: Iterable[Any]) -> list[Any]:
        """Return events of usable pages."""
        found: list[Any] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._clear()
                found.append(event)
            elif event.group_idx == self._state_group:
                for name in event.block_hashes:
                    found += self._used(name) if isinstance(event, BlockStored) else self._unused(name)
            elif isinstance(event, BlockStored):
                for page in _split(event):
                    found += self._stored(page)
            else:
                for name in event.block_hashes:
                    found += self._removed(name)
        return found

    def _stored(self, page: BlockStored) -> list[BlockStored]:
        [name] = page.block_hashes
        self._copies[name] += 1
        if name in self._pages:
            return []
        self._pages[name] = page
        return [*self._used(page.parent_block_hash), page] if self._uses[name] else []

    def _removed(self, name: Any) -> list[BlockRemoved]:
        self._copies[name] -= 1
        if self._copies[name]:
            return []
        del self._copies[name]
        page = self._pages.pop(name)
        if not self._uses[name]:
            return []
        gone = BlockRemoved([name], page.medium, page.group_idx)
        return [gone, *self._unused(page.parent_block_hash)]

    def _used(self, name: Any) -> list[BlockStored]:
        """Count a use of a page. Return the pages that became usable by it, from the first on."""
        found: list[BlockStored] = []
        while name is not None:
            self._uses[name] += 1
            page = self._pages.get(name)
            if page is None or self._uses[name] > 1:
                break
            found.append(page)
            name = page.parent_block_hash
        return found[::-1]

    def _unused(self, name: Any) -> list[BlockRemoved]:
        found: list[BlockRemoved] = []
        while name is not None:
            self._uses[name] -= 1
            page = self._pages.get(name)
            if self._uses[name]:
                break
            del self._uses[name]
            if page is None:
                break
            found.append(BlockRemoved([name], page.medium, page.group_idx))
            name = page.parent_block_hash
        return found


def _split(event: BlockStored) -> list[BlockStored]:
    """Return an event for each block."""
    size, names, pages = event.block_size, event.block_hashes, []
    for i, name in enumerate(names):
        page = copy(event)
        page.block_hashes, page.parent_block_hash = [name], names[i - 1] if i else event.parent_block_hash
        page.token_ids = event.token_ids[i * size : (i + 1) * size]
        for field in ("extra_keys", "lookahead_token_ids"):
            if each := getattr(event, field, None):
                setattr(page, field, [each[i]])
        pages.append(page)
    return pages
