"""Manage the blocks of a pool: FREE -> WRITING -> COMMITTED."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from mambacache.cache.retention import NEEDED, SPARE, Chains, EvictionOrder, Kind, Needs, Record, Turn

RemovedCallback = Callable[[bytes, int, bool], None]
"""Called with (hash, block, evicted) when a block loses its hash."""


class Lease:
    """Holds a reference, released once; `used` is the last use to restore, None if this is a use."""

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
    """Manages blocks with ids from 1 on.

    WRITING blocks are private. COMMITTED blocks have a hash and are immutable, evictable without references.
    """

    def __init__(self, num_blocks: int, on_removed: RemovedCallback, chains: Chains) -> None:
        self._on_removed = on_removed
        self._free = list(range(num_blocks, 0, -1))
        self._set_up(num_blocks, num_blocks + 1, chains)

    def _set_up(self, num_blocks: int, num_ids: int, chains: Chains) -> None:
        self.num_blocks = num_blocks  # maximum
        self.spill: Callable[[], bool] = lambda: False  # makes blocks spare; False if impossible
        self.on_valued: Callable[[int, bool], None] = lambda *_: None  # a block leaves or joins group SPARE
        self.heir: Callable[[int], int | None] = lambda _: None  # is hit in its place
        self.idle = EvictionOrder(chains)
        self._blocks: dict[bytes, int] = {}
        self.lookup = self._blocks.get  # hash -> COMMITTED block or None
        self.references = [0] * num_ids
        self.hashes: list[bytes | None] = [None] * num_ids
        self.exact = [False] * num_ids
        self.group = [SPARE] * num_ids
        self.useless = [False] * num_ids  # evicted first
        self.born = [0] * num_ids  # the writing issue
        self.writer = [0] * num_ids  # request number; 0: an earlier process

    def reusable(self, block_hash: bytes, strict: bool) -> int:
        """Return the COMMITTED block of a hash, exact if `strict`, or 0."""
        block = self.lookup(block_hash)
        return block if block is not None and (self.exact[block] or not strict) else 0

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self.idle)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return self.num_blocks

    @property
    def num_committed(self) -> int:
        return len(self._blocks)

    def counts(self) -> dict[str, int]:
        free, committed = self.num_free, len(self._blocks)
        writing = self.num_owned - free - committed
        return {"free": free, "writing": writing, "committed": committed, "evictable": len(self.idle)}

    def take(self, count: int, near: int = 0) -> list[int]:
        """Return WRITING blocks, if possible near a block; callers check `num_available`."""
        while len(self._free) < count:
            self._make_room()
        blocks = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def lease(self, requested: bool = True) -> Lease | None:
        """Lease a WRITING block, if there is room; unless `requested`, evict spare blocks only."""
        if not self.num_free and not self._make_room(requested):
            return None
        return Lease(self, self.take(1)[0])

    def share(self, block: int) -> Lease:
        self.hold(block)
        return Lease(self, block)

    def hold(self, block: int) -> None:
        """Share without a lease."""
        if not self.references[block]:
            self._wake(block)
        self.references[block] += 1

    def lend(self, block: int) -> Lease:
        """Share without counting as a use."""
        used = None if self.references[block] else self._wake(block)
        self.references[block] += 1
        return Lease(self, block, used)

    def seize(self, block: int) -> Lease:
        if not self.references[block]:
            self._free.remove(block)
        self.references[block] += 1
        return Lease(self, block)

    def release(self, block: int, used: float | None = None) -> None:
        """Drop a reference; `used` is the last use, None for now."""
        references = self.references[block] - 1
        self.references[block] = references
        if references:
            return
        if self.hashes[block] is None:
            self._free_again(block)
        elif self.useless[block]:
            self.idle.put_first(block)
        elif used is None:
            self.idle.add(block, self.group[block])
        else:
            self.idle.put_back(block, self.group[block], used)

    def _make_room(self, requested: bool = True) -> bool:
        return self.evict(requested)

    def _wake(self, block: int) -> float:
        return self.idle.remove(block, self.group[block])

    def _free_again(self, block: int) -> None:
        self._free.append(block)

    def commit(self, block: int, block_hash: bytes, *, exact: bool, group: int, born: int = 0, writer: int = 0) -> bool:
        """Name a WRITING block; return False if a block at least as exact has the hash."""
        holder = self._blocks.get(block_hash)
        if holder is not None:
            if self.exact[holder] or not exact:
                return False
            group = group or self.group[holder]
            self._forget(holder)
        self._blocks[block_hash] = block
        self.hashes[block] = block_hash
        self.exact[block] = exact
        self.useless[block] = False
        self._set_group(block, group)
        self.born[block], self.writer[block] = born, writer
        return True

    def promote(self, block: int, group: int) -> None:
        """Set the group; counts as a use."""
        if not self.references[block]:
            self.idle.remove(block, self.group[block])
            self.idle.add(block, group)
        self.useless[block] = False
        self._set_group(block, group)

    def regroup(self, block: int, group: int) -> None:
        """Set the group; does not count as a use."""
        if not self.references[block]:
            self.idle.move(block, self.group[block], group)
        self._set_group(block, group)

    def _set_group(self, block: int, group: int) -> None:
        before, self.group[block] = self.group[block], group
        if (before == SPARE) != (group == SPARE):
            self.on_valued(block, group != SPARE)

    def need(self, block_hash: bytes, needed: bool) -> None:
        """Regroup a page, unless it is evicted first anyway."""
        if (block := self.lookup(block_hash)) is not None and not self.useless[block]:
            self.regroup(block, NEEDED if needed else SPARE)

    def set_leaf(self, block_hash: bytes, leaf: bool) -> None:
        if (block := self.lookup(block_hash)) is not None:
            self.regroup(block, self.group[block] // 2 * 2 + (not leaf))

    def evict_first(self, block: int) -> None:
        if self.useless[block]:
            return
        if not self.references[block]:
            self.idle.remove(block, self.group[block])
            self.idle.put_first(block)
        self.useless[block] = True
        self._set_group(block, SPARE)

    def evict(self, requested: bool = True) -> bool:
        while requested and not self.idle.num_spare and len(self.idle) and self.spill():
            pass
        return self._evict(self.idle.first(requested))

    def evict_leaf(self, frees: Callable[[bytes], bool] = bool) -> bool:
        """Evict a state without a state behind it, if `frees` holds for its hash."""
        return self._evict(self.idle.first_leaf(lambda block: frees(self.hashes[block] or b"")))

    def _evict(self, block: int | None) -> bool:
        if block is None:
            return False
        heir = self.heir(block) if self.group[block] != SPARE else None
        if heir and not self.references[heir]:
            self.group[heir] = self.idle.inherit(heir, block) or self.group[heir]
        self._forget(block, evicted=True)
        return True

    def withdraw(self, block: int) -> None:
        if self.references[block] != 1:
            raise RuntimeError(f"block {block} has {self.references[block]} holders and cannot be withdrawn")
        self._forget(block)

    def drop(self, block_hash: bytes, *, evicted: bool = False, writer: int | None = None) -> None:
        """Forget a hash unless another request than `writer` wrote it."""
        block = self._blocks.get(block_hash)
        if block is not None and writer in (None, self.writer[block]):
            self._forget(block, evicted)

    def drop_born(self, since: int) -> None:
        for block in [b for b in self._blocks.values() if self.born[b] >= since]:
            self._forget(block)

    def clear(self) -> None:
        for block in list(self._blocks.values()):
            self._forget(block)

    def _forget(self, block: int, evicted: bool = False) -> None:
        block_hash = self.hashes[block]
        assert block_hash is not None
        if not self.references[block]:
            self.idle.remove(block, self.group[block])
        del self._blocks[block_hash]
        self._set_group(block, SPARE)
        self.hashes[block] = None
        if not self.references[block]:
            self._free_again(block)
        self._on_removed(block_hash, block, evicted)

    def check(self, held: Iterable[int]) -> None:
        counted = [0] * len(self.references)
        for block in held:
            counted[block] += 1
        assert counted == self.references, f"references {self.references}, held {counted}"
        assert {h: b for b, h in enumerate(self.hashes) if h is not None} == self._blocks, "hashes and blocks differ"
        self._check_idle(counted, {b for b in self._blocks.values() if not counted[b]})

    def _check_idle(self, counted: Sequence[int], idle: set[int]) -> None:
        free = set(self._free)
        assert len(free) == len(self._free) and not any(counted[b] or self.hashes[b] for b in free), "a free block"
        assert idle == self.idle.blocks(), "the evictable blocks"
        assert len(free) + len(idle) + sum(map(bool, counted)) == self.num_blocks, "a block is lost"


class Prefixes:
    """Follows the prefixes of a pool's states, and the KV that these states need."""

    def __init__(self, pool: BlockPool, need: Callable[[bytes, bool], None], chains: Chains) -> None:
        self.pool, self._reuse = pool, chains.reuse
        self.needs = Needs(need, pool.set_leaf)
        self.of: list[tuple[Sequence[bytes], int]] = [((), 0)] * len(pool.hashes)  # chain and depth, by block
        pool.on_valued, pool.heir, pool.idle.gain = self._valued, self._heir, self._gain

    def value(self, block: int, kind: Kind = Kind.BRANCH, turn: Turn | None = None) -> None:
        """Note a use of a state, and let its record decide on eviction."""
        chain, depth = self.of[block]
        record = self._reuse.records.get(chain[depth]) or Record(kind, turn or Turn(depth), self._reuse.now)
        self.pool.promote(block, self._reuse.group(record) + self.needs.has_below(chain[depth]))

    def restore(self, block_hash: bytes) -> bool:
        """Undo `evict_first`; return whether the state exists."""
        block = self.pool.lookup(block_hash)
        if block is not None and self.pool.useless[block]:
            self.value(block)
        return block is not None

    def _gain(self, block: int) -> int:
        return self.needs.gain(*self.of[block])

    def _heir(self, block: int) -> int | None:
        chain, depth = self.of[block]
        above = depth - self.needs.gain(chain, depth)
        return self.pool.lookup(chain[above]) if above else None

    def _valued(self, block: int, valued: bool) -> None:
        (self.needs.add if valued else self.needs.remove)(*self.of[block])

    def check(self, pages: BlockPool) -> None:
        pool, committed = self.pool, [block for block, each in enumerate(self.pool.hashes) if each is not None]
        assert all(chain[depth] == pool.hashes[b] for b in committed for chain, depth in [self.of[b]]), "a prefix"
        valued = {pool.hashes[block]: block for block in committed if pool.group[block] != SPARE}
        counts, above = Counter[bytes](), set[bytes]()
        for chain, depth in map(self.of.__getitem__, valued.values()):
            top = next((d for d in range(depth - 1, 0, -1) if chain[d] in valued), 0)
            counts.update(chain[top + 1 : depth + 1])
            above.add(chain[top])
        assert counts == self.needs.counts, "the KV that states need"
        assert all(pool.group[block] % 2 == (each in above) for each, block in valued.items()), "states behind states"
        for page, block_hash in enumerate(pages.hashes):
            if block_hash is not None and not pages.useless[page]:
                assert pages.group[page] == self.needs.group(block_hash), "the group of a page"
