"""Share one memory between states and KV pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import log2

from mambacache.cache.pool import BlockPool, Lease, RemovedCallback
from mambacache.cache.retention import Chains, EvictionOrder
from mambacache.config import KV_TOKENS_PER_STATE, CacheConfig

MEMORY = 8
"""Averages take num_slabs / MEMORY evicted slabs, at least 8."""

FEW = 16
"""A pool may keep num_slabs / FEW empty slabs, at least 2."""

LEAN = 0.5
"""A slab moves above this mean log2 ratio of the reuse that a slab of each pool would lose."""


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
    slabs.divide(*pools, KV_TOKENS_PER_STATE // config.block_size)
    return slabs, *pools


class Slabs:
    """Divides slabs 1 to `num_slabs` between the pools; slab 0 holds the null blocks.

    A slab moves to the pool whose evictions have long lost more reuse, or that has nothing to evict: rarely, as a move
    evicts blocks of many chains.
    """

    def __init__(self, num_slabs: int, reserve: int) -> None:
        self.num_slabs = num_slabs
        self._reserve = reserve  # slabs for running requests' states
        self._lean = 0.0  # above 0: a slab of pages loses more reuse than a slab of states
        self._memory = max(num_slabs // MEMORY, 8)
        self._few = max(num_slabs // FEW, 2)
        self._wasted = 0  # slabs evicted despite empty slabs

    def divide(self, states: SlabPool, pages: SlabPool, pages_per_state: int) -> None:
        self.pools = states, pages
        share = pages.per_slab / (pages.per_slab + pages_per_state * states.per_slab)
        first = min(max(round(share * self.num_slabs), self._reserve), self.num_slabs - 1)
        for slab in range(1, self.num_slabs + 1):
            (states if slab <= first else pages).adopt(slab)

    def obtainable(self, pool: SlabPool) -> int:
        """Count slabs that the other pool could give up."""
        states, pages = self.pools
        if pool is states:
            return pages.num_idle_slabs
        return max(min(states.num_idle_slabs, states.num_slabs - self._reserve), 0)

    def weigh(self, pool: SlabPool) -> bool:
        """Return whether `pool` should take a slab before it evicts more."""
        states, pages = self.pools
        kept = self._few + (self._reserve if pool is pages else 0)
        self._wasted = self._wasted + 1 if self._other(pool).num_empty > kept else 0
        if self._wasted > self._memory:
            return True
        cold, late = states.idle.coldness() / states.per_slab, states.idle.lateness() / pages.per_slab
        if cold > 0 and late > 0:
            self._lean += (min(max(log2(cold / late), -1), 1) - self._lean) / self._memory
        due = self._lean > LEAN if pool is pages else self._lean < -LEAN
        if due and self.obtainable(pool):
            self._lean /= 2
            return True
        return False

    def move(self, pool: SlabPool) -> None:
        """Move the other pool's least useful slab to `pool`."""
        pool.adopt(self._other(pool).give_up())

    def exchange(self, slab: int, pool: SlabPool) -> None:
        """Move this empty slab to `pool`, for another empty slab if possible."""
        other = self._other(pool)
        pool.adopt(other.give_up(slab))
        if pool.num_empty > 1:
            other.adopt(pool.give_up())

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
        self._slabs, self._chains = slabs, chains
        self._free_in: OrderedDict[int, list[int]] = OrderedDict()  # by slab
        self._num_free = 0
        self._empty: OrderedDict[int, None] = OrderedDict()
        self._busy = [0] * (slabs.num_slabs + 1)  # referenced blocks by slab
        self._idle_slabs = EvictionOrder(chains)  # unreferenced, not empty
        self._slab_group: dict[int, int] = {}  # highest group in each idle slab
        self._slab_used = [0.0] * (slabs.num_slabs + 1)  # lending is no use
        self._evicted = 0  # since the last `weigh`

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
        return len(self._idle_slabs) + len(self._empty)

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
        slab, last = block // self.per_slab, self.references[block] == 1
        if last:
            self._busy[slab] -= 1
            if used is None:
                self._slab_used[slab] = self._chains.now
        super().release(block, used)
        if last and not self._busy[slab] and slab not in self._empty:
            ids = self._ids(slab)
            group = self._slab_group[slab] = max(self.group[each] for each in ids if self.hashes[each] is not None)
            if used is None:
                self._idle_slabs.add(slab, group)
            else:
                self._idle_slabs.put_back(slab, group, self._slab_used[slab])

    def _taken(self, slab: int, blocks: Sequence[int]) -> None:
        self._num_free -= len(blocks)
        self._empty.pop(slab, None)
        if not self._free_in[slab]:
            del self._free_in[slab]
        self._occupy(slab, len(blocks))

    def _wake(self, block: int) -> float:
        self._occupy(block // self.per_slab, 1)
        return super()._wake(block)

    def _occupy(self, slab: int, count: int) -> None:
        if slab in self._slab_group:
            self._idle_slabs.remove(slab, self._slab_group.pop(slab))
        self._busy[slab] += count

    def _free_again(self, block: int) -> None:
        slab = block // self.per_slab
        free = self._free_in.setdefault(slab, [])
        free.append(block)
        self._num_free += 1
        if len(free) == self.per_slab:
            if slab in self._slab_group:
                self._idle_slabs.remove(slab, self._slab_group.pop(slab))
            self._empty[slab] = None

    def _make_room(self, requested: bool = True) -> bool:
        """Free at least a block; False if impossible."""
        self._evicted += requested
        if self._evicted >= self.per_slab:
            self._evicted = 0
            if self._slabs.weigh(self):
                self._slabs.move(self)
                return True
        if self.evict(requested):
            return True
        if requested and self._slabs.obtainable(self):
            self._slabs.move(self)
            return True
        return False

    def adopt(self, slab: int) -> None:
        """Add a slab of free blocks."""
        self.num_slabs += 1
        self._free_in[slab] = self._ids(slab)
        self._num_free += self.per_slab
        self._empty[slab] = None

    def give_up(self, slab: int = 0) -> int:
        """Remove and return this empty slab; if 0, any empty slab or the next victim."""
        if not slab and not self._empty:
            first = self._idle_slabs.first(requested=True)
            assert first is not None
            for block in self._ids(first):
                if self.hashes[block] is not None:
                    self._forget(block, evicted=True)
        slab = slab or next(iter(self._empty))
        del self._empty[slab], self._free_in[slab]
        self._num_free -= self.per_slab
        self.num_slabs -= 1
        return slab

    def owned_slabs(self) -> set[int]:
        held = (block for block, count in enumerate(self.references) if count)
        return {block // self.per_slab for block in (*held, *self._blocks.values())} | self._free_in.keys()

    def _ids(self, slab: int) -> list[int]:
        """List a slab's blocks, deepest first."""
        return list(range((slab + 1) * self.per_slab - 1, slab * self.per_slab - 1, -1))

    def _check_idle(self, counted: Sequence[int], idle: set[int]) -> None:
        per, free = self.per_slab, [block for blocks in self._free_in.values() for block in blocks]
        assert len(set(free)) == len(free) == self._num_free, "free blocks"
        assert not any(counted[b] or self.hashes[b] for b in free), "a free block"
        assert idle == self.idle.blocks(), "the evictable blocks"
        assert len(free) + len(idle) + sum(map(bool, counted)) == self.num_owned, "a block is lost"
        busy = [sum(map(bool, counted[start : start + per])) for start in range(0, len(counted), per)]
        assert busy == self._busy, "references, by slab"
        resting = {b // per for b in idle if not busy[b // per]}
        assert resting == self._idle_slabs.blocks() == self._slab_group.keys(), "idle slabs"
        empty = {slab for slab, blocks in self._free_in.items() if len(blocks) == per}
        assert self._empty.keys() == empty, "empty slabs"
