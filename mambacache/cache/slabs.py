"""One memory for states and KV pages, which goes where it is used."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mambacache.cache.pool import BlockPool


import os
H = float(os.environ.get('H','1.5'))
class Slabs:
    """Slabs of one size, 1 to `num_slabs`, each of them free or one pool's; slab 0 holds the null blocks.

    A pool that lacks blocks takes a free slab. Where there is none, what is coldest goes, be it a block of its own or a
    slab of another pool none of whose blocks has a reference: times without use compare across pools, as they are
    counted alike.

    Args:
        num_slabs: 0 for none, to which no pool belongs.
        reserve: slabs that the first pool has, or finds free, whatever others need: running requests' states.
    """

    def __init__(self, num_slabs: int, reserve: int = 0) -> None:
        self.num_slabs = num_slabs
        self.free = list(range(num_slabs, 0, -1))
        self.pools: list[BlockPool] = []
        self._reserve = reserve

    def spare(self, pool: BlockPool) -> int:
        """Free slabs that a pool may take."""
        if not self.free or pool is self.pools[0]:
            return len(self.free)
        return max(len(self.free) - max(self._reserve - self.pools[0].num_slabs, 0), 0)

    def obtainable(self, pool: BlockPool) -> int:
        """Slabs that a pool may take, or that others would give up for it."""
        return self.spare(pool) + sum(self._idle(other) for other in self.pools if other is not pool)

    def take_from_other(self, pool: BlockPool, own: float) -> bool:
        """Evicts a slab of another pool"""
        for other in self.pools:
            if other is not pool and self._idle(other) and other.coldest() > H * own:
                other.give_up_slab()
                return True
        return False

    def _idle(self, pool: BlockPool) -> int:
        idle = pool.num_idle_slabs
        return idle if pool is not self.pools[0] else max(min(idle, pool.num_slabs - self._reserve), 0)

    def put_last(self, slab: int) -> bool:
        """Makes this the free slab that is taken next; False if it is not free."""
        if slab not in self.free:
            return False
        self.free.remove(slab)
        self.free.append(slab)
        return True

    def check(self) -> None:
        """Raises AssertionError unless every slab is free, or one pool's."""
        owned = [slab for pool in self.pools for slab in pool.owned_slabs()]
        assert sorted(self.free + owned) == list(range(1, self.num_slabs + 1)), "a slab is lost, or of two pools"
        assert len(owned) == sum(pool.num_slabs for pool in self.pools), "slabs of pools"
