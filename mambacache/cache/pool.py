"""Blocks of one pool: ids, reference counts, leases, and their life FREE -> WRITING -> COMMITTED."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from mambacache.cache.chains import Chains, Rank
from mambacache.cache.policy import EvictionOrder
from mambacache.cache.slabs import Slabs

RemovedCallback = Callable[[bytes, int, bool], None]
"""Called with (hash, block, evicted) when a hash stops naming a block; `evicted` if room was needed."""


class Lease:
    """A block held by someone. However often it is ended, the block is given back once.

    `used`: where it is to return to in the order of eviction; None if being held makes it the last one used.
    """

    __slots__ = ("block", "pool", "used")

    def __init__(self, pool: BlockPool, block: int, used: float | None = None) -> None:
        self.pool = pool
        self.block = block
        self.used = used

    def end(self) -> None:
        block, self.block = self.block, 0
        if block:
            self.pool.release(block, self.used)


class BlockPool:
    """Ids from 1 on; id 0 is the null block and never handed out.

    FREE blocks have no reference and no hash. WRITING blocks are private: referenced, no hash, and may be a dst.
    COMMITTED blocks carry a hash, are immutable and shared by reference; without references they may be evicted, in the
    order of `EvictionOrder`. Every call is O(1) a block, amortised.

    Args:
        num_blocks: of a pool with memory of its own.
        on_removed: told of each hash that names no block any more.
        slabs: memory that pools share instead, each slab of which holds `per_slab` blocks: slab i those with the ids
            from i * per_slab on.
    """

    def __init__(
        self, num_blocks: int, on_removed: RemovedCallback, chains: Chains, slabs: Slabs | None = None,
        per_slab: int = 0,
    ) -> None:  # fmt: skip
        self._slabs = slabs if slabs is not None else Slabs(0)
        self._shared = slabs is not None
        self.num_blocks = self._slabs.num_slabs * per_slab if self._shared else num_blocks
        self.per_slab = per_slab if self._shared else num_blocks + 1
        size = (self._slabs.num_slabs + 1) * self.per_slab
        self._on_removed = on_removed
        # By slab, of those that are this pool's: memory of its own is one, which it never gives up.
        self._free: dict[int, list[int]] = {} if self._shared or not num_blocks else {0: list(range(num_blocks, 0, -1))}
        self._num_free = sum(map(len, self._free.values()))
        self.num_slabs = 0  # of the shared ones
        self.idle = EvictionOrder(chains)  # COMMITTED blocks without references
        self._grouped = self._shared and per_slab > 1
        self._busy: dict[int, int] = {}  # blocks of a slab with references
        self._idle_slabs = EvictionOrder(chains) if self._grouped else self.idle  # those without
        self._slab_rank: dict[int, Rank] = {}  # of idle ones
        self._empty: dict[int, Any] = {} if self._grouped else self._free  # slabs all of whose blocks are free
        self._blocks: dict[bytes, int] = {}
        self.lookup = self._blocks.get  # the COMMITTED block that a hash names, or None
        self.references = [0] * size
        self.hashes: list[bytes | None] = [None] * size
        self.exact = [False] * size
        self.rank = [Rank.SPARE] * size
        self._useless = [False] * size  # goes first once it has no references
        self.born = [0] * size  # number of the issue that wrote a COMMITTED block
        if slabs is not None:
            slabs.pools.append(self)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free ones and those it may evict, of other pools of the memory as well."""
        return self._num_free + len(self.idle) + self.per_slab * self._slabs.obtainable(self)

    @property
    def num_free(self) -> int:
        return self._num_free + self.per_slab * self._slabs.spare(self)

    @property
    def num_owned(self) -> int:
        """Blocks that the pool has memory for as it is divided now."""
        return self.num_slabs * self.per_slab if self._shared else self.num_blocks

    @property
    def num_idle_slabs(self) -> int:
        """Slabs none of whose blocks has a reference."""
        return len(self._idle_slabs) + len(self._empty)

    @property
    def num_committed(self) -> int:
        return len(self._blocks)

    def counts(self) -> dict[str, int]:
        """Blocks by status; evictable ones are committed too."""
        committed = len(self._blocks)
        return {
            "free": self.num_free,
            "writing": self.num_owned - self._num_free - committed,
            "committed": committed,
            "evictable": len(self.idle),
        }

    # --- references ---

    def take(self, count: int, near: int = 0) -> list[int]:
        """So many WRITING blocks at once, each with one reference, where there is a choice beside the block `near`; the
        caller checked that they are available."""
        while self._num_free < count:
            self._make_room()
        blocks: list[int] = []
        slab = near // self.per_slab
        while count:
            slab = slab if slab in self._free else next(iter(self._free))
            free = self._free[slab]
            taken = free[: -count - 1 : -1]
            del free[len(free) - len(taken) :]
            self._empty.pop(slab, None) if self._grouped else None
            if not free:
                del self._free[slab]
            if self._grouped:
                self._occupy(slab, len(taken))
            count -= len(taken)
            self._num_free -= len(taken)
            blocks += taken
        for block in blocks:
            self.references[block] = 1
        return blocks

    def lease(self, asked: bool = True) -> Lease | None:
        """A WRITING block, evicting a COMMITTED one if it must; None if there is none to take."""
        if not self._num_free and not self._make_room(asked):
            return None
        return Lease(self, self.take(1)[0])

    def share(self, block: int) -> Lease:
        """One more reference to a block that is referenced or COMMITTED."""
        self.hold(block)
        return Lease(self, block)

    def hold(self, block: int) -> None:
        """`share` without a lease, for who gives back many blocks together."""
        if not self.references[block]:
            self.idle.remove(block, self.rank[block])
            if self._grouped:
                self._occupy(block // self.per_slab)
        self.references[block] += 1

    def lend(self, block: int) -> Lease:
        """`share` of a COMMITTED block for whom reading it is no use of it."""
        used = None if self.references[block] else self.idle.remove(block, self.rank[block])
        if used is not None and self._grouped:
            self._occupy(block // self.per_slab)
        self.references[block] += 1
        return Lease(self, block, used)

    def seize(self, block: int) -> Lease:
        """A reference to this very block, which is free or was seized."""
        slab = block // self.per_slab
        if not self.references[block]:
            if self._slabs.put_last(slab):
                self._adopt()
            self._free[slab].remove(block)
            self._empty.pop(slab, None) if self._grouped else None
            self._num_free -= 1
            if not self._free[slab]:
                del self._free[slab]
            if self._grouped:
                self._occupy(slab)
        self.references[block] += 1
        return Lease(self, block)

    def release(self, block: int, used: float | None = None) -> None:
        """One reference less; the last one frees a private block and makes a COMMITTED one evictable, as the one used
        last, or where it stood if it was lent, and `used` then."""
        references = self.references[block] - 1
        self.references[block] = references
        if references:
            return
        if self._grouped:
            self._busy[block // self.per_slab] -= 1
        if self.hashes[block] is None:
            self._free_again(block)
        elif self._useless[block]:
            self.idle.put_first(block)
        elif used is None:
            self.idle.add(block, self.rank[block])
        else:
            self.idle.put_back(block, self.rank[block], used)
        if self._grouped:
            self._leave(block // self.per_slab, used)

    # --- hashes ---

    def commit(self, block: int, block_hash: bytes, *, exact: bool, rank: Rank, born: int = 0) -> bool:
        """Names a WRITING block by its hash; False, and it stays private, if a block at least as exact has it."""
        holder = self._blocks.get(block_hash)
        if holder is not None:
            if self.exact[holder] or not exact:
                return False
            rank = max(rank, self.rank[holder])
            self._forget(holder)
        self._blocks[block_hash] = block
        self.hashes[block] = block_hash
        self.exact[block] = exact
        self.rank[block], self._useless[block] = rank, False
        self.born[block] = born
        return True

    def promote(self, block: int, rank: Rank) -> None:
        """Ranks a COMMITTED block, which was used just now."""
        if not self.references[block]:
            self.idle.remove(block, self.rank[block])
            self.idle.add(block, rank)
        self.rank[block], self._useless[block] = rank, False

    def restore(self, block_hash: bytes, rank: Rank) -> bool:
        """Takes back `demote` of the COMMITTED block of a hash; False if there is none."""
        block = self._blocks.get(block_hash)
        if block is not None and self._useless[block]:
            self.promote(block, rank)
        return block is not None

    def demote(self, block: int) -> None:
        """Makes a COMMITTED block the first to be evicted."""
        if self._useless[block]:
            return
        if not self.references[block]:
            self.idle.remove(block, self.rank[block])
            self.idle.put_first(block)
        self.rank[block], self._useless[block] = Rank.SPARE, True

    def evict(self, asked: bool = True) -> bool:
        """Frees the COMMITTED block without references that is to go first; False if there is none."""
        block = self.idle.first(asked)
        if block is None:
            return False
        self._forget(block, evicted=True)
        return True

    # --- shared memory ---

    def _make_room(self, asked: bool = True) -> bool:
        """One free block at least: of a slab that is nobody's, else by evicting what goes first, here or, for a block
        that somebody asked for, in another pool. False if there is none."""
        if self._slabs.spare(self):
            self._adopt()
            return True
        if asked and self._slabs.take_from_other(self, self.coldest()):
            return True
        return self.evict(asked)

    def coldest(self) -> float:
        """How cold the block is that is to go first, of those that somebody asked for."""
        return self.idle.coldness()

    def give_up_slab(self) -> None:
        """Leaves an empty slab to others, or empties the one that is to go first; the end of a chain is in the last
        blocks."""
        if not self._empty:
            slab = self._idle_slabs.first(True)
            assert slab is not None
            for block in range((slab + 1) * self.per_slab - 1, slab * self.per_slab - 1, -1):
                if self.hashes[block] is not None:
                    self._forget(block, evicted=True)
        slab = next(iter(self._empty))
        self._empty.pop(slab)
        self._free.pop(slab, None)
        self._num_free -= self.per_slab
        self.num_slabs -= 1
        self._slabs.free.append(slab)

    def owned_slabs(self) -> set[int]:
        """Those of the shared memory that hold this pool's blocks."""
        held = (block for block, count in enumerate(self.references) if count)
        return {block // self.per_slab for block in (*held, *self._blocks.values())} | set(self._free)

    def _adopt(self) -> int:
        """A slab that was nobody's is this pool's."""
        slab = self._slabs.free.pop()
        self.num_slabs += 1
        self._free[slab] = list(range((slab + 1) * self.per_slab - 1, slab * self.per_slab - 1, -1))
        if self._grouped:
            self._empty[slab] = None
        self._num_free += self.per_slab
        return slab

    def _occupy(self, slab: int, count: int = 1) -> None:
        """So many blocks of a slab have references that had none."""
        busy = self._busy.get(slab, 0)
        if not busy and slab in self._slab_rank:
            self._idle_slabs.remove(slab, self._slab_rank.pop(slab))
        self._busy[slab] = busy + count

    def _leave(self, slab: int, used: float | None) -> None:
        """A block of a slab has no reference any more; `used` as of a `Lease`."""
        if self._busy.get(slab) != 0:
            return
        blocks = range(slab * self.per_slab, (slab + 1) * self.per_slab)
        rank = self._slab_rank[slab] = max(self.rank[b] for b in blocks if self.hashes[b] is not None)
        if used is None:
            self._idle_slabs.add(slab, rank)
        else:
            self._idle_slabs.put_back(slab, rank, used)

    def _free_again(self, block: int) -> None:
        slab = block // self.per_slab
        free = self._free.setdefault(slab, [])
        free.append(block)
        self._num_free += 1
        if self._grouped and len(free) == self.per_slab:
            self._busy.pop(slab, None)
            if slab in self._slab_rank:
                self._idle_slabs.remove(slab, self._slab_rank.pop(slab))
            self._empty[slab] = None

    def withdraw(self, block: int) -> None:
        """COMMITTED back to private, for the block's sole holder."""
        if self.references[block] != 1:
            raise RuntimeError(f"block {block} has {self.references[block]} holders and cannot be withdrawn")
        self._forget(block)

    def drop(self, block_hash: bytes, evicted: bool = False) -> None:
        """Forgets a hash; its block is freed, or stays private to those who hold it."""
        block = self._blocks.get(block_hash)
        if block is not None:
            self._forget(block, evicted)

    def drop_born(self, since: int) -> None:
        """Forgets the hashes of all blocks that were written by this issue or a later one."""
        for block in [b for b in self._blocks.values() if self.born[b] >= since]:
            self._forget(block)

    def clear(self) -> None:
        """Forgets every hash."""
        for block in list(self._blocks.values()):
            self._forget(block)

    def _forget(self, block: int, evicted: bool = False) -> None:
        block_hash = self.hashes[block]
        assert block_hash is not None
        del self._blocks[block_hash]
        self.hashes[block] = None
        if not self.references[block]:
            self.idle.remove(block, self.rank[block])
            self._free_again(block)
        self._on_removed(block_hash, block, evicted)

    def check(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless the references are those of `held` (a block as often as it is held), and every
        block is free, referenced or evictable."""
        counted = [0] * len(self.references)
        for block in held:
            counted[block] += 1
        assert counted == self.references, f"references {self.references}, held {counted}"
        assert {h: b for b, h in enumerate(self.hashes) if h is not None} == self._blocks, "hashes and blocks differ"
        free = {block for blocks in self._free.values() for block in blocks}
        assert len(free) == self._num_free and not any(counted[b] or self.hashes[b] for b in free), "a free block"
        idle = {b for b in self._blocks.values() if not counted[b]}
        assert idle == self.idle.blocks(), "the evictable blocks"
        assert len(free) + len(idle) + sum(map(bool, counted)) == self.num_owned, "a block is lost"
        if self._grouped:
            self._check_slabs(counted, idle)

    def _check_slabs(self, counted: list[int], idle: set[int]) -> None:
        per = self.per_slab
        busy = {slab: sum(map(bool, counted[slab * per : (slab + 1) * per])) for slab in self._busy}
        assert busy == self._busy and sum(busy.values()) == sum(map(bool, counted)), "blocks with references, by slab"
        assert {b // per for b in idle} - {s for s, n in busy.items() if n} == self._idle_slabs.blocks(), "idle slabs"
