"""Order a host engine's KV pages for eviction."""

from __future__ import annotations

from collections.abc import Iterable

from mambacache.cache.retention import Chains, EvictionOrder, Rank


class KVOrder:
    """Orders unused pages. A page has the highest rank of the requests that released it."""

    _order: EvictionOrder

    def __init__(self) -> None:
        self._ranks: dict[int, Rank] = {}  # of used pages too
        self._unused: dict[int, None] = {}  # in the order of their last use

    def follow(self, chains: Chains) -> None:
        self._order = EvictionOrder(chains, rising=True)  # the last page of a prefix goes first
        for page in self._unused:
            self._order.add(page, self._rank(page))

    def _rank(self, page: int) -> Rank:
        return self._ranks.get(page, Rank.FIRST)

    def has(self, page: int) -> bool:
        return page in self._unused

    def release(self, pages: Iterable[int], rank: Rank) -> None:
        self._ranks.update((page, max(self._rank(page), rank)) for page in pages)

    def add(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._unused[page] = None
            self._order.add(page, self._rank(page))

    def remove(self, page: int) -> None:
        del self._unused[page]
        self._order.remove(page, self._rank(page))

    def drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page in self._unused:
                self.remove(page)
            self._ranks.pop(page, None)

    def evict(self, count: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < count and (page := self._order.first(requested=True)) is not None:
            self.drop([page])
            pages.append(page)
        return pages

    def check(self) -> None:
        assert self._order.blocks() == self._unused.keys(), "the host's unused pages"
