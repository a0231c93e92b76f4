"""Hash chains of token blocks, and what is found along one: coverage, hit and junction."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mambacache.cache.block_pool import BlockPool


def root_hash(*keys: object) -> bytes:
    """Where a chain begins: equal for sequences that may share, and for no others."""
    return hashlib.blake2b(repr(keys).encode(), digest_size=16).digest()


def extend_chain(chain: list[bytes], tokens: array[int], block_size: int) -> None:
    """Appends the hashes of the whole blocks of `tokens` that `chain` (its root first) lacks.

    The hash of a block is blake2b-128 over the hash before it and the block's token ids.
    """
    digest, parent = hashlib.blake2b, chain[-1]
    for end in range(len(chain) * block_size, len(tokens) + 1, block_size):
        parent = digest(parent + tokens[end - block_size : end].tobytes(), digest_size=16).digest()
        chain.append(parent)


def common_blocks(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Leading blocks that two chains (roots first) share, by bisection: equal hashes mean equal prefixes."""
    if a[0] != b[0]:
        return 0
    low, high = 0, min(len(a), len(b))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[middle] == b[middle] else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Match:
    """What a chain meets in the cache, in blocks from its beginning."""

    coverage: int  # leading blocks whose KV is cached
    hit: int  # the deepest reusable state
    junction: int  # where the prompt leaves what others computed; 0 if that is no deeper than the hit


class PrefixIndex:
    """Finds the deepest reusable state along a hash chain.

    A chain is `[root, hash of block 0, hash of block 1, ...]`, so that entry i stands for the prefix of i blocks.
    Hashes of computed blocks are remembered in a bounded LRU after their KV is gone (or where there is none).
    """

    def __init__(self, states: BlockPool, kv: BlockPool | None, max_seen: int, strict: bool) -> None:
        self._states = states
        self._kv = kv
        self._strict = strict
        self._max_seen = max_seen
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def saw(self, block_hash: bytes) -> None:
        """A block was computed."""
        self._seen[block_hash] = None
        self._seen.move_to_end(block_hash)
        if len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        self._seen.clear()

    def usable(self, pool: BlockPool, block_hash: bytes) -> bool:
        """Whether a pool holds this block, under `strict_reuse` exactly computed."""
        block = pool.lookup(block_hash)
        return block is not None and (pool.exact[block] or not self._strict)

    def match(self, chain: Sequence[bytes], limit: int, host_coverage: int | None) -> Match:
        """Looks along the first `limit` blocks of a chain for states and along all of it for KV.

        Args:
            limit: blocks at most to resume after: one token at least must be computed.
            host_coverage: leading blocks that the host's KV covers; None where the KV pool knows, or nothing needs KV.
        """
        coverage = len(chain) - 1
        if self._kv is not None:
            coverage = self._leading(self._kv, chain)
        elif host_coverage is not None:
            coverage = min(coverage, host_coverage)
        hit = min(limit, coverage)
        while hit and not self.usable(self._states, chain[hit]):
            hit -= 1
        needs_kv = self._kv is not None or host_coverage is not None
        met, junction = min(limit, coverage) if needs_kv else hit, limit
        while junction > met and chain[junction] not in self._seen:
            junction -= 1
        return Match(coverage, hit, junction if junction > hit else 0)

    def _leading(self, pool: BlockPool, chain: Sequence[bytes]) -> int:
        for depth in range(1, len(chain)):
            if not self.usable(pool, chain[depth]):
                return depth - 1
        return len(chain) - 1
