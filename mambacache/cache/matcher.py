"""What a request finds in the cache, and why not more: looks only, takes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mambacache.cache.block_pool import BlockPool
from mambacache.cache.prefix_index import Match, PrefixIndex, common_blocks
from mambacache.cache.report import ComputedRecord, Loss, common_tokens, partition_loss
from mambacache.cache.sequence import ALWAYS_EXACT, CachedSequence, Promise
from mambacache.config import CacheConfig


@dataclass(frozen=True, slots=True)
class Hit:
    """What a prompt finds in the cache.

    Attributes:
        num_tokens: prompt tokens that need not be computed, a multiple of the block size.
        junction: where the prompt leaves what others computed, in tokens; 0 if that is no deeper than the hit.
        exact: whether the state, and the KV before it, were computed as a cold prefill computes them.
        waits_for: a running request that is about to compute a longer common prefix, or None.
        losses: tokens that others computed and that are computed again, by reason.
    """

    num_tokens: int
    junction: int
    exact: bool
    waits_for: str | None
    losses: dict[Loss, int]


class Matcher:
    """Puts together what index, pools, record and running requests say about a prompt."""

    def __init__(
        self,
        config: CacheConfig,
        states: BlockPool,
        kv: BlockPool | None,
        index: PrefixIndex,
        record: ComputedRecord,
        running: Mapping[str, CachedSequence],
    ) -> None:
        self._config = config
        self._states = states
        self._kv = kv
        self._index = index
        self._record = record
        self._running = running

    def match(self, s: CachedSequence, kv_tokens: int | None) -> Match:
        """Coverage, hit and junction; `kv_tokens` as in `PrefixCache.match`."""
        host_coverage = None
        if self._config.has_attention and self._kv is None:
            if kv_tokens is None:
                raise ValueError("kv_tokens is missing: say how many tokens the host's KV covers, or set num_kv_blocks")
            host_coverage = kv_tokens // self._config.block_size
        if not s.read:
            return Match(0, 0, 0)
        return self._index.match(s.chain, (len(s.tokens) - 1) // self._config.block_size, host_coverage)

    def hit(self, s: CachedSequence, match: Match, waits_for: str | None = None) -> Hit:
        """A match in tokens, with the losses up to what was ever computed."""
        size = self._config.block_size
        hit = match.hit * size
        ceiling = max(hit, min(len(s.tokens) - 1, self._longest_computed(s)))
        causes = [self._cause(s, match, depth) for depth in range(match.hit + 1, ceiling // size + 1)]
        losses = partition_loss(hit, ceiling, size, causes, not_asked=not s.read)
        return Hit(hit, match.junction * size, self.near_from(s, match) >= hit, waits_for, losses)

    def _cause(self, s: CachedSequence, match: Match, depth: int) -> Loss | None:
        """Why a request does not resume after `depth` blocks; None if nothing was ever put there."""
        if self._states.lookup(s.chain[depth]) is None:
            return self._record.fate(s.chain[depth])
        if depth <= match.coverage:
            return Loss.ONLY_NEAR
        # The state is there, but not all KV before it.
        gone = self._kv is None or self._kv.lookup(s.chain[match.coverage + 1]) is None
        return Loss.EVICTED if gone else Loss.ONLY_NEAR

    def _longest_computed(self, s: CachedSequence) -> int:
        """Tokens at the prompt's beginning that were ever computed, by requests that run now too."""
        size = self._config.block_size
        longest = self._record.longest(s.chain, s.tokens.tobytes())
        start = min(longest // size, len(s.chain) - 1) * size
        rest = s.tokens[start : start + size].tobytes()
        for other in self._running.values():
            if len(other.chain) > start // size and other.chain[start // size] == s.chain[start // size]:
                part = other.tokens[start : min(other.computed, start + size)]  # whole blocks are in the record
                longest = max(longest, start + common_tokens(part.tobytes(), rest))
        return longest

    def near_from(self, s: CachedSequence, match: Match) -> int:
        """The position from which states and KV computed after this hit are near."""
        block = self._states.lookup(s.chain[match.hit]) if match.hit else None
        if block is not None and not self._states.exact[block]:
            return 0
        for depth, kv_block in enumerate(self.shared_kv(s, match)):
            if self._kv is not None and not self._kv.exact[kv_block]:
                return depth * self._config.block_size
        return ALWAYS_EXACT

    def shared_kv(self, s: CachedSequence, match: Match) -> list[int]:
        """The KV blocks that cover the request's beginning, none where the host keeps the KV."""
        if self._kv is None:
            return []
        return [block for h in s.chain[1 : match.coverage + 1] if (block := self._kv.lookup(h)) is not None]

    def find_writer(self, s: CachedSequence, match: Match) -> Promise | None:
        """Who is about to compute the longest prefix shared with this request beyond its hit, and up to where."""
        size, strict = self._config.block_size, self._config.strict_reuse
        if not s.read or self._config.max_checkpoints == 0:
            return None
        best, limit = None, (len(s.tokens) - 1) // size
        for other in self._running.values():
            if not other.store or other.computed >= (len(other.chain) - 1) * size:
                continue
            boundary = min(common_blocks(s.chain, other.chain), limit) * size
            if strict and boundary > other.near_from:
                continue
            if boundary > max(match.hit * size, other.computed, best.boundary if best else 0):
                best = Promise(other, other.epoch, boundary)
        return best

    def still_waits(self, s: CachedSequence) -> bool:
        """Whether the state that a request waits for is neither there nor given up."""
        if s.waits is None:
            return False
        writer, boundary = s.waits.writer, s.waits.boundary
        gone = not writer.running or writer.epoch != s.waits.epoch or writer.computed >= boundary
        return not gone and not self._index.usable(self._states, s.chain[boundary // self._config.block_size])
