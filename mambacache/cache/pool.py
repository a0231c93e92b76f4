"""Manage the blocks of a pool: FREE -> WRITING -> COMMITTED."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mambacache.cache.retention import NEEDED, SPARE, Chains, EvictionOrder

Prefix = tuple[Sequence[bytes], int]
"""The chain and depth of a state."""

NO_PREFIX: Prefix = (), 0

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
        self.prefix = [NO_PREFIX] * num_ids  # of states
        self.exact = [False] * num_ids
        self.group = [SPARE] * num_ids
        self.useless = [False] * num_ids  # evicted first
        self._group_before = [SPARE] * num_ids  # before `evict_first`
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

    def commit(
        self, block: int, block_hash: bytes, *, exact: bool, group: int, born: int = 0, writer: int = 0,
        prefix: Prefix = NO_PREFIX,
    ) -> bool:  # fmt: skip
        """Name a WRITING block; return False if a block at least as exact has the hash."""
        holder = self._blocks.get(block_hash)
        if holder is not None:
            if self.exact[holder] or not exact:
                return False
            group = group or self.group[holder]
            self._forget(holder)
        self._blocks[block_hash] = block
        self.hashes[block], self.prefix[block] = block_hash, prefix
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
        if (block := self.lookup(block_hash)) is not None:
            self.regroup(block, NEEDED if needed else SPARE)

    def set_leaf(self, block_hash: bytes, leaf: bool) -> None:
        if (block := self.lookup(block_hash)) is not None:
            self.regroup(block, self.group[block] // 2 * 2 + (not leaf))

    def restore(self, block_hash: bytes, group: int | None = None) -> bool:
        """Undo `evict_first`; return whether it exists."""
        block = self._blocks.get(block_hash)
        if block is not None and self.useless[block]:
            self.promote(block, self._group_before[block] if group is None else group)
        return block is not None

    def evict_first(self, block: int) -> None:
        if self.useless[block]:
            return
        if not self.references[block]:
            self.idle.remove(block, self.group[block])
            self.idle.put_first(block)
        self._group_before[block] = self.group[block]
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
        self.hashes[block], self.prefix[block] = None, NO_PREFIX
        if not self.references[block]:
            self._free_again(block)
        self._on_removed(block_hash, block, evicted)

    def check(self, held: Iterable[int]) -> None:
        counted = [0] * len(self.references)
        for block in held:
            counted[block] += 1
        assert counted == self.references, f"references {self.references}, held {counted}"
        assert {h: b for b, h in enumerate(self.hashes) if h is not None} == self._blocks, "hashes and blocks differ"
        for block_hash, (chain, depth) in zip(self.hashes, self.prefix, strict=True):
            assert not chain or chain[depth] == block_hash, "the prefix of a block"
        self._check_idle(counted, {b for b in self._blocks.values() if not counted[b]})

    def _check_idle(self, counted: Sequence[int], idle: set[int]) -> None:
        free = set(self._free)
        assert len(free) == len(self._free) and not any(counted[b] or self.hashes[b] for b in free), "a free block"
        assert idle == self.idle.blocks(), "the evictable blocks"
        assert len(free) + len(idle) + sum(map(bool, counted)) == self.num_blocks, "a block is lost"
