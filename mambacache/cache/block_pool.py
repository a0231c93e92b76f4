"""Blocks of one pool: ids, reference counts, their life FREE -> WRITING -> COMMITTED, and the order of eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

RemovedCallback = Callable[[bytes, int, bool], None]
"""Called with (hash, block, evicted) when a hash stops naming a block; `evicted` if room was needed."""


class BlockPool:
    """Ids 1 to `num_blocks`; id 0 is the null block and never handed out.

    FREE blocks have no reference and no hash. WRITING blocks are private: referenced, no hash, and may be a dst.
    COMMITTED blocks carry a hash, are immutable and shared by reference; without references they may be evicted: first
    the cold ones (nobody asked for them), then the hot ones, each least recently used first. Every call is O(1).
    """

    def __init__(self, num_blocks: int, on_removed: RemovedCallback) -> None:
        self.num_blocks = num_blocks
        self._on_removed = on_removed
        self._free = list(range(num_blocks, 0, -1))
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._hot: OrderedDict[int, None] = OrderedDict()
        self._blocks: dict[bytes, int] = {}
        self.references = [0] * (num_blocks + 1)
        self.hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self.exact = [False] * (num_blocks + 1)
        self.hot = [False] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._cold) + len(self._hot)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones and those it may evict."""
        return len(self._free) + len(self._cold) + len(self._hot)

    @property
    def num_committed(self) -> int:
        return len(self._blocks)

    def counts(self) -> dict[str, int]:
        """Blocks by status; evictable ones are committed too."""
        free, committed = len(self._free), len(self._blocks)
        return {
            "free": free,
            "writing": self.num_blocks - free - committed,
            "committed": committed,
            "evictable": self.num_evictable,
        }

    def lookup(self, block_hash: bytes) -> int | None:
        """The COMMITTED block that a hash names, or None."""
        return self._blocks.get(block_hash)

    def allocate(self, cold_only: bool = False) -> int | None:
        """A WRITING block with one reference, evicting a COMMITTED one if it must; None if there is none to take."""
        if not self._free and not self.evict(cold_only):
            return None
        block = self._free.pop()
        self.references[block] = 1
        return block

    def evict(self, cold_only: bool = False) -> bool:
        """Frees the COMMITTED block without references that is to go first; False if there is none."""
        if self._cold:
            block = next(iter(self._cold))
        elif self._hot and not cold_only:
            block = next(iter(self._hot))
        else:
            return False
        self._forget(block, evicted=True)
        return True

    def share(self, block: int) -> None:
        """One more reference to a block that is referenced or COMMITTED."""
        if not self.references[block]:
            del (self._hot if self.hot[block] else self._cold)[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last one frees a private block and makes a COMMITTED one evictable."""
        self.references[block] -= 1
        if self.references[block]:
            return
        if self.hashes[block] is None:
            self._free.append(block)
        else:
            (self._hot if self.hot[block] else self._cold)[block] = None

    def commit(self, block: int, block_hash: bytes, *, exact: bool, hot: bool) -> bool:
        """Names a WRITING block by its hash; False, and it stays private, if a block at least as exact has it."""
        holder = self._blocks.get(block_hash)
        if holder is not None:
            if self.exact[holder] or not exact:
                return False
            hot = hot or self.hot[holder]
            self._forget(holder)
        self._blocks[block_hash] = block
        self.hashes[block] = block_hash
        self.exact[block] = exact
        self.hot[block] = hot
        return True

    def heat(self, block: int) -> None:
        """Moves a COMMITTED block from the cold blocks to the most recently used end of the hot ones."""
        if not self.references[block]:
            (self._hot if self.hot[block] else self._cold).pop(block)
            self._hot[block] = None
        self.hot[block] = True

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
            del (self._hot if self.hot[block] else self._cold)[block]
            self._free.append(block)
        self._on_removed(block_hash, block, evicted)
