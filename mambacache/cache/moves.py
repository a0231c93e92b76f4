"""Transfers between device and host, and what they hold until they are done: data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mambacache.cache.chains import Rank
from mambacache.cache.pool import BlockPool, Lease
from mambacache.cache.request import Load
from mambacache.plan import Transfer


@dataclass(slots=True, eq=False)
class Arrival:
    """A block of the device that a transfer writes, and what it is once that is done."""

    pool: BlockPool
    block: int
    block_hash: bytes
    exact: bool
    rank: Rank
    born: int
    writer: int
    depth: int  # blocks of the prefix that it ends

    @classmethod
    def copied(cls, source: Lease, target: Lease, block_hash: bytes, depth: int) -> Arrival:
        """What becomes of `target`, as it is what `source` was."""
        pool, block = source.pool, source.block
        flags = pool.exact[block], pool.rank[block], pool.born[block], pool.writer[block]
        return cls(target.pool, target.block, block_hash, *flags, depth)

    def name(self) -> bool:
        """The block has arrived; whether it is found by its hash."""
        return self.pool.commit(
            self.block, self.block_hash, exact=self.exact, rank=self.rank, born=self.born, writer=self.writer
        )


@dataclass(slots=True, eq=False)
class Move:
    """A transfer under way, and what is held for it."""

    transfer: Transfer
    leases: list[Lease] = field(default_factory=list)  # by turns a block on the device and a slot
    arrivals: list[Arrival] = field(default_factory=list)  # from the host
    coming: set[bytes] = field(default_factory=set)  # the hashes of pages on their way to the host
    load: Load | None = None  # for whom it comes from the host
    void: bool = False  # what it brings does not count

    def lose(self, block_hashes: Collection[bytes], writer: int | None) -> None:
        """Keep the blocks of these hashes from being named when they arrive, unless another request wrote them.

        The writer of a block from a file is not known.
        """
        self.arrivals = [
            arrival
            for arrival in self.arrivals
            if arrival.block_hash not in block_hashes or (writer is not None and arrival.writer not in (0, writer))
        ]

    def name(self) -> None:
        """Slots have arrived: each is found by the hash of the block that it is a copy of, unless that lost its own."""
        for lent, slot in zip(self.leases[::2], self.leases[1::2], strict=True):
            device, block = lent.pool, lent.block
            if (block_hash := device.hashes[block]) is not None:
                exact, rank, born = device.exact[block], device.rank[block], device.born[block]
                writer = device.writer[block]
                slot.pool.commit(slot.block, block_hash, exact=exact, rank=rank, born=born, writer=writer)


def check_under_way(transfer: Transfer, moves: Mapping[int, Move]) -> None:
    """Raises, as `PrefixCache.transferred` does, unless a transfer is one of these."""
    move = moves.get(transfer.number)
    if move is None or move.transfer != transfer:
        raise RuntimeError(f"transfer {transfer.number} is not under way: end each of `transfers` once")
