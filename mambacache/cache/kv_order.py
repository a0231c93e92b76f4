"""Order a host engine's KV pages for eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from mambacache.cache.retention import Needs


class KVOrder:
    """Orders unused pages by last use: first the pages that no state needs. If all are needed, evicts a state."""

    _needs: Needs
    _evict_state: Callable[[Callable[[bytes], bool]], bool]

    def __init__(self) -> None:
        self._hashes: dict[int, set[bytes]] = {}  # of used pages too; prompts may part within a block
        self._pages: dict[bytes, dict[int, None]] = {}  # first parts of a block first
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._needed: OrderedDict[int, None] = OrderedDict()

    def follow(self, needs: Needs, evict_state: Callable[[Callable[[bytes], bool]], bool]) -> None:
        self._needs, self._evict_state = needs, evict_state
        self._spare |= self._needed
        self._needed.clear()

    def has(self, page: int) -> bool:
        return page in self._spare or page in self._needed

    def release(self, pages: Mapping[int, bytes]) -> None:
        for page, block_hash in pages.items():
            hashes = self._hashes.setdefault(page, set())
            self._forget(page, [each for each in hashes if each not in self._needs.counts])
            hashes.add(block_hash)
            self._pages.setdefault(block_hash, {})[page] = None

    def _forget(self, page: int, hashes: Iterable[bytes]) -> None:
        for block_hash in hashes:
            self._hashes[page].remove(block_hash)
            del self._pages[block_hash][page]
            if not self._pages[block_hash]:
                del self._pages[block_hash]

    def need(self, block_hash: bytes, needed: bool) -> None:
        before, after = (self._spare, self._needed) if needed else (self._needed, self._spare)
        for page in reversed(self._pages.get(block_hash, {})):
            if page in before and self._is_needed(page) == needed:
                after[page] = before.pop(page)

    def _is_needed(self, page: int) -> bool:
        return not self._needs.counts.keys().isdisjoint(self._hashes.get(page, ()))

    def add(self, pages: Iterable[int]) -> None:
        for page in pages:
            (self._needed if self._is_needed(page) else self._spare)[page] = None

    def remove(self, page: int) -> None:
        del (self._needed if page in self._needed else self._spare)[page]

    def drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self.has(page):
                self.remove(page)
            self._forget(page, [*self._hashes.get(page, ())])
            self._hashes.pop(page, None)

    def evict(self, count: int) -> list[int]:
        pages: list[int] = []
        frees = True
        while len(pages) < count and (self._spare or self._needed):
            if frees and not self._spare:
                frees = self._evict_state(self._frees)
            pages.append(next(iter(self._spare or self._needed)))
            self.drop(pages[-1:])
        return pages

    def _frees(self, block_hash: bytes) -> bool:
        """Tell whether a state has KV that nobody uses."""
        return any(map(self.has, self._pages.get(block_hash, ())))

    def check(self) -> None:
        unused = self._spare.keys() | self._needed.keys()
        needed = set(filter(self._is_needed, unused))
        assert self._needed.keys() == needed and self._spare.keys() == unused - needed, "the host's unused pages"
