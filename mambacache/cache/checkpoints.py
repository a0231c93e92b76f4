"""States inside the prefill rows of a step: where a boundary is wished for, and there is a block for it."""

from __future__ import annotations

from collections.abc import Sequence

from mambacache.accounting.ledger import Ledger
from mambacache.cache.lookup import Lookup
from mambacache.cache.policy import Policy, Wish
from mambacache.cache.pool import BlockPool
from mambacache.cache.request import Life, Row


class Checkpoints:
    """The blocks beside the dsts, from the plan of a step until it is issued."""

    def __init__(self, pool: BlockPool, lookup: Lookup, policy: Policy, ledger: Ledger, block_size: int) -> None:
        self._pool = pool
        self._lookup = lookup
        self._policy = policy
        self._ledger = ledger
        self._size = block_size
        self.unwritten = 0  # blocks of rows that are not issued yet

    def plan(self, rows: Sequence[Row]) -> None:
        """When every row has its dst: blocks for wished-for boundaries inside the prefill rows."""
        wanted: list[tuple[Wish, int, int]] = []
        for order, row in enumerate(rows):
            step, life = row.step, row.life
            end = step.start + step.num_tokens
            if end // self._size == step.start // self._size or not life.request.store or life.request.stale:
                continue
            self._promise(life, step.start, end)
            if step.prefill:
                wanted += [(wish, order, p) for wish, p in self._policy.between(life.wishes, step.start, end)]
        planned: dict[bytes, bool] = {}
        for wish, order, position in sorted(wanted):
            life = rows[order].life
            block_hash = life.request.chain[position // self._size]
            exact = position <= life.inexact_from
            held = self._pool.lookup(block_hash)
            if held is not None and (self._pool.exact[held] or not exact):
                continue
            if planned.get(block_hash, -1) >= exact:
                continue
            asked = self._policy.asked(wish)
            lease = self._pool.lease(asked) if self.has_room(asked) else None
            if lease is None:
                self._ledger.refused(block_hash)
                continue
            planned[block_hash] = exact
            rows[order].checkpoints[position] = lease
            self.unwritten += 1
        for row in rows:
            row.planned = True
            if row.checkpoints:
                checkpoints = {position: lease.block for position, lease in row.checkpoints.items()}
                row.step = row.step._replace(checkpoints=checkpoints)

    def _promise(self, life: Life, start: int, end: int) -> None:
        """Wishes for the boundaries where waiting requests will resume, whether or not this step could admit them."""
        if not self._policy.max_checkpoints:
            return
        chain, size = life.request.chain, self._size
        for depth in self._lookup.awaited(chain, start // size + 1, min(end // size, len(chain) - 1)):
            if self._lookup.worth_a_wait(life, depth):
                self._policy.promise(life.wishes, depth * size)

    def has_room(self, asked: bool) -> bool:
        """Whether the budget holds one more checkpoint, if need be by evicting one."""
        most = self._policy.max_checkpoints
        full = self._pool.num_committed + self.unwritten >= most
        return not full or (most > 0 and self._pool.evict(asked))

    def end(self, row: Row) -> None:
        """The row was issued, and its states have their hashes, or it will not be."""
        self.unwritten -= len(row.checkpoints)
        for position in sorted(row.checkpoints, reverse=True):
            row.checkpoints[position].end()
        row.checkpoints = {}
