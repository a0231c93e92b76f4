"""Share one memory between states and KV pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mambacache.cache.pool import BlockPool, Lease, RemovedCallback
from mambacache.cache.retention import SPARE, Chains
from mambacache.config import CacheConfig


def make_pools(
    config: CacheConfig, state_removed: RemovedCallback, page_removed: RemovedCallback, chains: Chains
) -> tuple[Slabs | None, BlockPool, BlockPool]:
    """Return the slabs of shared memory, and the pools of states and pages."""
    if config.slab is None:
        states = BlockPool(config.num_state_blocks, state_removed, chains)
        return None, states, BlockPool(config.num_kv_blocks, page_removed, chains)
    states_a_slab, pages_a_slab = config.slab
    num_slabs = config.num_state_blocks // states_a_slab
    slabs = Slabs(num_slabs, reserve=num_slabs - config.num_kv_blocks // pages_a_slab)
    pools = SlabPool(slabs, states_a_slab, state_removed, chains), SlabPool(slabs, pages_a_slab, page_removed, chains)
    slabs.divide(*pools)
    return slabs, *pools


class Slabs:
    """Divides slabs 1 to `num_slabs` between the pools; slab 0 holds the null blocks.

    For pages, states beyond the reserve or leaves are evicted. An unused slab moves to the pool that lacks room.
    """

    def __init__(self, num_slabs: int, reserve: int) -> None:
        self.num_slabs = num_slabs
        self._reserve = reserve  # slabs for running requests' states

    def divide(self, states: SlabPool, pages: SlabPool) -> None:
        self.pools = states, pages
        states.idle.kv = states.per_slab / pages.per_slab
        for slab in range(1, self.num_slabs + 1):
            (states if slab <= self._reserve else pages).adopt(slab)

    def obtainable(self, pool: SlabPool, unused: bool = False) -> int:
        """Count slabs, or unused slabs, that the other pool could give up."""
        other = self._other(pool)
        count = other.num_unused_slabs if unused else other.num_idle_slabs
        return count if pool is self.pools[0] else min(count, self._beyond_reserve)

    def spill(self, pool: SlabPool) -> bool:
        """Evict a state in favour of pages; False without a candidate."""
        states, pages = self.pools
        if pool is states:
            return False
        return states.evict() if self._beyond_reserve else len(pages.idle) > 0 and states.evict_leaf()

    def move(self, pool: SlabPool) -> None:
        """Move the other pool's longest idle slab, empty first."""
        pool.adopt(self._other(pool).give_up())

    def exchange(self, slab: int, pool: SlabPool) -> None:
        """Move this empty slab to `pool`, for another empty slab if possible."""
        other = self._other(pool)
        pool.adopt(other.give_up(slab))
        if pool.num_empty > 1:
            other.adopt(pool.give_up())

    @property
    def _beyond_reserve(self) -> int:
        return max(self.pools[0].num_slabs - self._reserve, 0)

    def _other(self, pool: SlabPool) -> SlabPool:
        states, pages = self.pools
        return states if pool is pages else pages

    def check(self) -> None:
        owned = [slab for pool in self.pools for slab in pool.owned_slabs()]
        assert sorted(owned) == list(range(1, self.num_slabs + 1)), "a slab is lost, or of two pools"
        assert len(owned) == sum(pool.num_slabs for pool in self.pools), "slabs of pools"


class SlabPool(BlockPool):
    """Manages blocks in slabs; slab i begins at id i * per_slab."""

    def __init__(self, slabs: Slabs, per_slab: int, on_removed: RemovedCallback, chains: Chains) -> None:
        self._on_removed = on_removed
        self._set_up(slabs.num_slabs * per_slab, (slabs.num_slabs + 1) * per_slab, chains)
        self.num_slabs, self.per_slab = 0, per_slab
        self._slabs = slabs
        self._free_in: OrderedDict[int, list[int]] = OrderedDict()  # by slab
        self._num_free = 0
        self._empty: OrderedDict[int, None] = OrderedDict()
        self._referenced = [0] * (slabs.num_slabs + 1)  # blocks by slab
        self._valued = [0] * (slabs.num_slabs + 1)  # unreferenced blocks not of group SPARE
        self._idle_slabs: OrderedDict[int, None] = OrderedDict()  # without referenced blocks
        self._unused = [0] * (slabs.num_slabs + 1)  # free and spare blocks
        self._by_unused: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(per_slab + 1)]  # slabs

    @property
    def num_available(self) -> int:
        return self._num_free + len(self.idle) + self.per_slab * self._slabs.obtainable(self)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_owned(self) -> int:
        return self.num_slabs * self.per_slab

    @property
    def num_idle_slabs(self) -> int:
        return len(self._idle_slabs)

    @property
    def num_unused_slabs(self) -> int:
        return len(self._by_unused[self.per_slab])

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    def take(self, count: int, near: int = 0) -> list[int]:
        while self._num_free < count:
            self._make_room()
        blocks: list[int] = []
        slab = near // self.per_slab
        while len(blocks) < count:
            slab = slab if slab in self._free_in else next(iter(self._free_in))
            free = self._free_in[slab]
            taken = free[: -(count - len(blocks)) - 1 : -1]
            del free[len(free) - len(taken) :]
            self._taken(slab, taken)
            blocks += taken
        for block in blocks:
            self.references[block] = 1
        return blocks

    def seize(self, block: int) -> Lease:
        if not self.references[block]:
            slab = block // self.per_slab
            if slab not in self._free_in:  # after a rebuild the other pool may own it, empty
                self._slabs.exchange(slab, self)
            self._free_in[slab].remove(block)
            self._taken(slab, [block])
        self.references[block] += 1
        return Lease(self, block)

    def release(self, block: int, used: float | None = None) -> None:
        if self.references[block] == 1:
            self._change(block, referenced=-1, valued=self.group[block] != SPARE)
        super().release(block, used)

    def _taken(self, slab: int, blocks: Sequence[int]) -> None:
        self._num_free -= len(blocks)
        self._empty.pop(slab, None)
        if not self._free_in[slab]:
            del self._free_in[slab]
        self._change(blocks[0], referenced=len(blocks))

    def _wake(self, block: int) -> float:
        self._change(block, referenced=1, valued=-(self.group[block] != SPARE))
        return super()._wake(block)

    def _set_group(self, block: int, group: int) -> None:
        if not self.references[block]:
            self._change(block, valued=(group != SPARE) - (self.group[block] != SPARE))
        super()._set_group(block, group)

    def _change(self, block: int, referenced: int = 0, valued: int = 0) -> None:
        slab = block // self.per_slab
        self._referenced[slab] += referenced
        self._valued[slab] += valued
        self._sort(slab)

    def _sort(self, slab: int) -> None:
        self._by_unused[self._unused[slab]].pop(slab, None)
        self._unused[slab] = unused = self.per_slab - self._referenced[slab] - self._valued[slab]
        self._by_unused[unused][slab] = None
        if self._referenced[slab]:
            self._idle_slabs.pop(slab, None)
        else:
            self._idle_slabs.setdefault(slab)

    def _free_again(self, block: int) -> None:
        slab = block // self.per_slab
        free = self._free_in.setdefault(slab, [])
        free.append(block)
        self._num_free += 1
        if len(free) == self.per_slab:
            self._empty[slab] = None

    def _make_room(self, requested: bool = True) -> bool:
        """Free at least a block; False if impossible."""
        while not self.idle.num_spare:
            if self._slabs.obtainable(self, unused=True):
                self._slabs.move(self)
                return True
            if not requested or not self._slabs.spill(self):
                break
        if self.idle.num_spare:
            self._evict_spare()
            return True
        if self._evict(self.idle.first(requested)):
            return True
        if requested and self._slabs.obtainable(self):
            self._slabs.move(self)
            return True
        return False

    def _evict_spare(self) -> None:
        """Evict the spare blocks of the fullest slab, so that others become unused."""
        fullest = next(slab for slabs in self._by_unused for slab in slabs if self._has_spare(slab))
        for block in self._ids(fullest):
            if self.hashes[block] is not None and not self.references[block] and self.group[block] == SPARE:
                self._forget(block, evicted=True)

    def _has_spare(self, slab: int) -> bool:
        return self._unused[slab] > len(self._free_in.get(slab, ()))

    def adopt(self, slab: int) -> None:
        """Add a slab of free blocks."""
        self.num_slabs += 1
        self._free_in[slab] = self._ids(slab)
        self._num_free += self.per_slab
        self._empty[slab] = None
        self._sort(slab)

    def give_up(self, slab: int = 0) -> int:
        """Remove and return this empty slab; if 0, an idle slab."""
        slab = slab or next(iter(self._empty or self._by_unused[self.per_slab] or self._idle_slabs))
        for block in self._ids(slab):
            if self.hashes[block] is not None:
                self._forget(block, evicted=True)
        del self._empty[slab], self._free_in[slab], self._idle_slabs[slab], self._by_unused[self.per_slab][slab]
        self._num_free -= self.per_slab
        self.num_slabs -= 1
        return slab

    def owned_slabs(self) -> set[int]:
        held = (block for block, count in enumerate(self.references) if count)
        return {block // self.per_slab for block in (*held, *self._blocks.values())} | self._free_in.keys()

    def _ids(self, slab: int) -> list[int]:
        """List a slab's blocks, highest first."""
        return list(range((slab + 1) * self.per_slab - 1, slab * self.per_slab - 1, -1))

    def _check_idle(self, counted: Sequence[int], idle: set[int]) -> None:
        per, free = self.per_slab, [block for blocks in self._free_in.values() for block in blocks]
        assert len(set(free)) == len(free) == self._num_free, "free blocks"
        assert not any(counted[b] or self.hashes[b] for b in free), "a free block"
        assert idle == self.idle.blocks(), "the evictable blocks"
        assert len(free) + len(idle) + sum(map(bool, counted)) == self.num_owned, "a block is lost"
        owned = self._free_in.keys() | {b // per for b in range(len(counted)) if counted[b] or self.hashes[b]}
        for slab in owned:
            blocks = range(slab * per, slab * per + per)
            referenced = sum(counted[b] > 0 for b in blocks)
            valued = sum(not counted[b] and self.group[b] != SPARE for b in blocks)
            assert (referenced, valued) == (self._referenced[slab], self._valued[slab]), "blocks of a slab"
            assert slab in self._by_unused[per - referenced - valued], "a slab's unused blocks"
            assert (slab in self._idle_slabs) == (not referenced), "an idle slab"
            assert (slab in self._empty) == (len(self._free_in.get(slab, ())) == per), "an empty slab"
        listed = [slab for slabs in self._by_unused for slab in slabs]
        assert sorted(listed) == sorted(owned) and self._idle_slabs.keys() | self._empty.keys() <= owned, "other slabs"
