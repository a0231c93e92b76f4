"""Manage the KV pages of running requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from mambacache.cache.pool import BlockPool
from mambacache.cache.requests import ALWAYS_EXACT, Residency
from mambacache.cache.retention import Needs
from mambacache.plan import PageTables


class Pages:
    """Manages KV pages; without a pool every call succeeds."""

    def __init__(self, block_size: int, pool: BlockPool, needs: Needs) -> None:
        self.block_size = block_size
        self.pool = pool
        self._needs = needs
        self.present = pool.num_blocks > 0
        self._lacking = 0  # pages still needed by admitted prompts

    def coverage(self, chain: Sequence[bytes], strict: bool) -> int:
        lookup, exact = self.pool.lookup, self.pool.exact
        for depth in range(1, len(chain)):
            page = lookup(chain[depth])
            if page is None or (strict and not exact[page]):
                return depth - 1
        return len(chain) - 1

    def exact_until(self, chain: Sequence[bytes], coverage: int) -> int:
        exact = [self.pool.exact[page] for page in self._covering(chain, coverage)]
        return ALWAYS_EXACT if all(exact) else exact.index(False) * self.block_size

    def has_room(self, chain: Sequence[bytes], coverage: int, num_tokens: int) -> bool:
        if not self.present:
            return True
        shared = self._covering(chain, coverage)
        idle = [self.pool.references[page] for page in shared].count(0)
        return self._blocks(num_tokens) - len(shared) <= self.pool.num_available - idle - self._lacking

    def begin(self, residency: Residency, chain: Sequence[bytes], coverage: int) -> None:
        residency.shared_pages = coverage if self.present else 0
        residency.pages.extend(self._covering(chain, coverage))
        for page in residency.pages:
            self.pool.hold(page)
        self._lacking += self._lack(residency)

    def fork(self, parent: Residency, child: Residency) -> bool:
        """Share full pages and plan a copy of a partial page; False, and no change, without room."""
        if not self.present:
            return True
        full, partial = divmod(parent.computed, self.block_size)
        if partial and not self.pool.num_available:
            return False
        child.shared_pages = full
        for page in parent.pages[:full]:
            self.pool.hold(page)
            child.pages.append(page)
        self._lacking += self._lack(child)
        if partial:
            own = parent.copy_page  # the parent may be a fork before its copy
            child.copy_page = self.pool.share(own.block if own is not None else parent.pages[full])
            self.grow(child, parent.computed)
        return True

    def grow(self, residency: Residency, end: int) -> bool:
        """Add pages up to `end`; False, with nothing changed, without room."""
        missing = self._blocks(end) - len(residency.pages)
        if missing <= 0 or not self.present:
            return True
        if self.pool.num_available < missing:
            return False
        lacked = self._lack(residency)
        residency.pages.extend(self.pool.take(missing, near=residency.pages[-1] if residency.pages else 0))
        self._lacking += self._lack(residency) - lacked
        return True

    def shrink(self, residency: Residency, count: int) -> None:
        lacked = self._lack(residency)
        while len(residency.pages) > count:
            self.pool.release(residency.pages.pop())
        self._lacking += self._lack(residency) - lacked

    def commit(self, residency: Residency, depth: int, block_hash: bytes, born: int) -> bool:
        """Commit page `depth` - 1; return whether it is new."""
        if depth <= residency.shared_pages or not self.present:
            return False
        exact, writer = depth * self.block_size <= residency.inexact_from, residency.request.number
        page = residency.pages[depth - 1]
        group = self._needs.group(block_hash)
        return self.pool.commit(page, block_hash, exact=exact, group=group, born=born, writer=writer)

    def tables(self, residencies: Sequence[Residency]) -> PageTables | None:
        if not self.present:
            return None
        copied = [0 if residency.copy_page is None else residency.copy_page.block for residency in residencies]
        return PageTables(
            [residency.pages for residency in residencies],
            [residency.shared_pages for residency in residencies],
            copied,
        )

    def copied(self, residency: Residency) -> None:
        if residency.copy_page is not None:
            residency.copy_page.end()
            residency.copy_page = None

    def end(self, residency: Residency) -> None:
        self.copied(residency)
        pages, residency.pages = residency.pages, array("i")
        for page in reversed(pages):  # evicts chains from their ends
            self.pool.release(page)

    def unused(self, residency: Residency) -> None:
        self._lacking -= self._lack(residency)

    def check(self, residencies: Sequence[Residency], running: Sequence[Residency], others: Sequence[int]) -> None:
        copies = [residency.copy_page.block for residency in residencies if residency.copy_page is not None]
        self.pool.check([*(page for residency in residencies for page in residency.pages), *copies, *others])
        assert self._lacking == sum(map(self._lack, running)), "pages that admitted prompts lack"

    def _covering(self, chain: Sequence[bytes], coverage: int) -> list[int]:
        blocks = chain[1 : coverage + 1] if self.present else ()  # the host's KV may cover more
        return [page for page in map(self.pool.lookup, blocks) if page is not None]

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _lack(self, residency: Residency) -> int:
        return max(0, self._blocks(residency.prefill_end) - len(residency.pages)) if self.present else 0
