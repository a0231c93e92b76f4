"""Transfers between device and host, and what they hold until they are done: data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mambacache.cache.chains import Rank
from mambacache.cache.pool import BlockPool, Lease
from mambacache.cache.request import Load
from mambacache.plan import Transfer


@dataclass(slots=True, eq=False)
class Arrival:
    """A block that a transfer writes, and what it is once that is done."""

    pool: BlockPool
    block: int
    block_hash: bytes
    exact: bool
    rank: Rank
    born: int
    depth: int  # blocks of the prefix that it ends; 0 in host memory, where nobody asks

    @classmethod
    def copied(cls, source: Lease, target: Lease, block_hash: bytes, depth: int = 0) -> Arrival:
        """What becomes of `target`, as it is what `source` was."""
        pool, block = source.pool, source.block
        flags = pool.exact[block], pool.rank[block], pool.born[block]
        return cls(target.pool, target.block, block_hash, *flags, depth)

    def name(self) -> bool:
        """The block has arrived; whether it is found by its hash."""
        return self.pool.commit(self.block, self.block_hash, exact=self.exact, rank=self.rank, born=self.born)


@dataclass(slots=True, eq=False)
class Move:
    """A transfer under way, and what is held for it."""

    transfer: Transfer
    leases: list[Lease] = field(default_factory=list)  # by turns a block on the device and a slot
    arrivals: list[Arrival] = field(default_factory=list)
    coming: set[bytes] = field(default_factory=set)  # to the host, by their hashes
    load: Load | None = None  # for whom it comes from the host
    void: bool = False  # what it brings does not count


def check_under_way(transfer: Transfer, moves: Mapping[int, Move]) -> None:
    """Raises, as `PrefixCache.transferred` does, unless a transfer is one of these."""
    move = moves.get(transfer.number)
    if move is None or move.transfer != transfer:
        raise RuntimeError(f"transfer {transfer.number} is not under way: end each of `transfers` once")
