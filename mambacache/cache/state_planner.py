"""Decides src, dst and checkpoint blocks of every row, and when what a step writes becomes readable.

A step's life: `allocate` (its dst and KV blocks) -> `add_checkpoints` -> `issued` (the forward pass is on the stream:
src is released, and what consists of known tokens is committed) -> `accept` (its tokens were read: the rest is
committed). `cancel` stands for a step that was never issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mambacache.cache.batch_arrays import BlockTable, Row
from mambacache.cache.block_pool import BlockPool
from mambacache.cache.prefix_index import PrefixIndex, extend_chain
from mambacache.cache.report import CacheEvent, CacheStats, ComputedRecord, Loss
from mambacache.cache.retention import Retention
from mambacache.cache.sequence import CachedSequence
from mambacache.config import CacheConfig
from mambacache.plan import CHUNK, NULL_BLOCK, PLACEHOLDER, SequenceStep


class StatePlanner:
    """The only place where state blocks are chosen; see `BlockPool` for their life.

    A sequence holds its running state by one reference (`state`), and at most one more block besides: the src of a
    prefill step until it is issued.
    """

    def __init__(
        self,
        config: CacheConfig,
        states: BlockPool,
        kv: BlockPool | None,
        index: PrefixIndex,
        retention: Retention,
        record: ComputedRecord,
        stats: CacheStats,
        events: deque[CacheEvent],
    ) -> None:
        self._block_size = config.block_size
        self._max_checkpoints = config.num_state_blocks if config.max_checkpoints is None else config.max_checkpoints
        self._states = states
        self._kv = kv
        self._index = index
        self._retention = retention
        self._record = record
        self._stats = stats
        self._events = events
        self._unwritten = 0  # checkpoint blocks of steps that are not issued yet
        self.table = BlockTable() if kv is not None else None

    # --- a life begins ---

    def admit(self, s: CachedSequence, hit_block: int, hit: int, shared_kv: Sequence[int]) -> None:
        """Takes references to the state and the KV blocks that were hit, and a block for the first step's dst."""
        if hit_block:
            self._states.share(hit_block)
            self._states.heat(hit_block)
        s.begin(self.table.take_row() if self.table is not None else 0)
        s.computed, s.advanced = hit, hit // self._block_size
        s.state = s.conv = hit_block
        s.reserve = self._states.allocate() or 0
        self._share_kv(s, shared_kv)
        s.kv_shared = len(shared_kv)

    def fork(self, parent: CachedSequence, child: CachedSequence) -> bool:
        """The child goes on from the parent's state; False, and nothing has changed, without room for a KV page."""
        full, partial = divmod(parent.computed, self._block_size)
        if self._kv is not None and partial and not self._kv.num_available:
            return False
        child.begin(self.table.take_row() if self.table is not None else 0)
        child.computed = child.prefill_end = parent.computed
        child.near_from, child.advanced = parent.near_from, parent.advanced
        child.state, child.conv, child.conv_offset = parent.state, parent.conv, parent.conv_offset
        for block in {child.state, child.conv}:
            self._states.share(block)
        if self._kv is not None:
            self._share_kv(child, parent.kv[:full])
            child.kv_shared = full
            if partial:
                child.kv_source = parent.kv[full]
                self._kv.share(child.kv_source)
                self._append_kv(child)
        return True

    def _share_kv(self, s: CachedSequence, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self._kv is not None and self.table is not None
            self._kv.share(block)
            self.table.append(s, block)

    # --- before a step ---

    def allocate(self, s: CachedSequence, num_tokens: int, drafts: tuple[int, ...]) -> SequenceStep | None:
        """A row of `num_tokens` (and drafts) tokens with its dst blocks; None, and nothing changed, without room."""
        if s.drafted:
            raise RuntimeError(f"request {s.request_id!r} has drafts in flight: accept that step before the next one")
        start, prefill = s.computed, s.computed < s.prefill_end
        end = start + num_tokens + len(drafts)
        missing_kv = -(-end // self._block_size) - len(s.kv) if self._kv is not None else 0
        if missing_kv > 0 and self._kv is not None and self._kv.num_available < missing_kv:
            return None
        dst = self._fresh(s, 1) if prefill else self._decode_dst(s, num_tokens + len(drafts))
        if not dst:
            return None
        for _ in range(missing_kv):
            self._append_kv(s)
        step = SequenceStep(
            s.request_id, start, end - start, prefill, end >= s.prefill_end, s.state, s.conv, s.conv_offset, dst, drafts
        )
        step.epoch = s.epoch
        boundary = start // self._block_size * self._block_size + self._block_size
        if not prefill and start + 1 < boundary <= end:
            step.boundary_index = boundary - start - 1
        if not prefill or start % CHUNK:  # a step that is cut inside a chunk makes the next one start there
            s.near_from = min(s.near_from, start)
        return step

    def _append_kv(self, s: CachedSequence) -> None:
        assert self._kv is not None and self.table is not None
        block = self._kv.allocate()
        assert block is not None, "the caller checked that there is room"
        self.table.append(s, block)

    def _fresh(self, s: CachedSequence, count: int) -> tuple[int, ...]:
        if s.reserve:
            reserved, s.reserve = s.reserve, 0
            return (reserved,)
        if self._states.num_available < count:
            return ()
        return tuple(block for _ in range(count) if (block := self._states.allocate()))

    def _decode_dst(self, s: CachedSequence, count: int) -> tuple[int, ...]:
        """In place where the running state is private; where it stands on a boundary, rotation; else fresh blocks."""
        states, src = self._states, s.state
        if count > 1:
            return self._fresh(s, count)
        pending = bool(s.pending) and any(block == src for _, block in s.pending)
        if states.references[src] > 1 + pending:
            return self._fresh(s, 1)  # others hold it too
        if states.hashes[src] is None and not pending:
            return (src,)
        wish = self._retention.wish(s.wishes, s.computed)
        block = states.allocate(cold_only=not self._retention.hot(wish))
        if block is not None:
            return (block,)
        if pending:
            s.pending = [commit for commit in s.pending if commit[1] != src]
            states.release(src)
        else:
            states.withdraw(src)
        if s.computed <= len(s.tokens):
            self._record.set_fate(s.chain[s.computed // self._block_size], Loss.NO_CAPACITY)
        return (src,)

    def add_checkpoints(self, rows: Sequence[Row]) -> None:
        """Second pass, when every row has its dst: blocks for wished-for boundaries inside the prefill rows."""
        wanted = sorted(
            (wish, order, position)
            for order, (s, step) in enumerate(rows)
            if step.prefill and s.store and not s.stale
            for wish, position in self._retention.between(s.wishes, step.start, step.start + step.num_tokens)
        )
        planned: dict[bytes, int] = {}
        for wish, order, position in wanted:
            s, step = rows[order]
            block_hash = s.chain[position // self._block_size]
            exact = position <= s.near_from
            held = self._states.lookup(block_hash)
            if held is not None and (self._states.exact[held] or not exact):
                continue
            if planned.get(block_hash, -1) >= exact:
                continue
            block = self._checkpoint_block(hot=self._retention.hot(wish))
            if block is None:
                self._record.set_fate(block_hash, Loss.NO_CAPACITY)
                continue
            planned[block_hash] = exact
            step.checkpoints[position] = block

    def _checkpoint_block(self, hot: bool) -> int | None:
        if not self._checkpoint_room(hot):
            return None
        block = self._states.allocate(cold_only=not hot)
        self._unwritten += block is not None
        return block

    def _checkpoint_room(self, hot: bool) -> bool:
        """Whether the budget holds one more checkpoint, if need be by evicting one."""
        full = self._states.num_committed + self._unwritten >= self._max_checkpoints
        return not full or (self._max_checkpoints > 0 and self._states.evict(cold_only=not hot))

    # --- after it ---

    def issued(self, s: CachedSequence, step: SequenceStep) -> None:
        """The step is on the stream: whatever is issued later finds its dst written and its src read."""
        end = step.start + step.num_tokens
        self._release_running(s, keep=step.dst)
        self._release_kv_source(s)
        s.in_flight += step.samples
        if step.drafts:
            s.drafted = step.dst
            s.state = s.conv = 0
            return
        s.computed = end
        s.state = s.conv = step.dst[0]
        s.conv_offset = 0
        for position, block in sorted(step.checkpoints.items(), reverse=True):  # deepest first, as with KV blocks
            if not s.stale:
                self._name(s, position, block)
            self._states.release(block)
        self._unwritten -= len(step.checkpoints)
        if end % self._block_size == 0:
            self._commit(s, end, s.state)
        if end % self._block_size == 0 or step.prefill:
            self._advance(s)

    def accept(self, s: CachedSequence, step: SequenceStep, token_ids: Sequence[int]) -> None:
        """The step's tokens that remain after stops are known."""
        s.in_flight -= step.samples
        s.tokens.extend(token_ids)
        extend_chain(s.chain, s.tokens, self._block_size)
        if step.epoch != s.epoch:
            return
        if step.drafts:
            self._resolve_drafts(s, step)
        self._commit_pending(s)
        self._advance(s)

    def _resolve_drafts(self, s: CachedSequence, step: SequenceStep) -> None:
        """Keeps the states that consumed accepted tokens only: the last one to go on from, and one on a boundary."""
        fed, known = (PLACEHOLDER, *step.drafts), s.tokens[step.start : step.start + step.num_tokens]
        last = 0  # the last state that consumed known tokens only; where a stop was drafted, it has consumed that too
        while last + 1 < len(known) and fed[last + 1] == known[last + 1]:
            last += 1
        boundary = self._block_size - 1 - step.start % self._block_size
        s.drafted = ()
        s.computed = step.start + last + 1
        s.state = step.dst[last]
        s.conv, s.conv_offset = (s.state, 0) if last in (0, boundary) else (step.dst[0], last)
        if boundary <= last:
            self._commit(s, step.start + boundary + 1, step.dst[boundary])
        for block in step.dst:
            if block not in (s.state, s.conv):
                self._states.release(block)

    def cancel(self, s: CachedSequence, step: SequenceStep) -> None:
        """The step was not issued: its blocks are freed, and the sequence loses its own (dst == src may be torn)."""
        for block in (*step.dst, *step.checkpoints.values()):
            if block not in (s.state, s.conv):
                self._states.release(block)
        self._unwritten -= len(step.checkpoints)
        self.release(s, finished=False)

    def release(self, s: CachedSequence, *, finished: bool) -> None:
        """Gives back every block that a sequence holds; what is committed stays."""
        for _, block in s.pending:
            self._states.release(block)
        if finished and s.checkpoint is not None:
            last = self._states.lookup(s.checkpoint[1])
            if last is not None:
                self._states.heat(last)
        self._record_tail(s)
        self._record.touch(s.chain)
        self._release_running(s)
        for block in (*s.drafted, s.reserve):
            if block:
                self._states.release(block)
        if self._kv is not None and self.table is not None:
            self._release_kv_source(s)
            for block in reversed(s.kv):  # deepest first, so that chains are evicted from their ends
                self._kv.release(block)
            self.table.give_row(s.row)
        s.end()

    def _release_kv_source(self, s: CachedSequence) -> None:
        if s.kv_source and self._kv is not None:
            self._kv.release(s.kv_source)
            s.kv_source = 0

    # --- commits ---

    def _release_running(self, s: CachedSequence, keep: Sequence[int] = ()) -> None:
        for block in {s.state, s.conv} - {NULL_BLOCK}:
            if block not in keep:
                self._states.release(block)

    def _commit(self, s: CachedSequence, position: int, block: int) -> None:
        """Commits a state that stands on a boundary where a step ended, now or when its tokens are known."""
        if not s.store or s.stale:
            return
        if position > len(s.tokens):
            self._states.share(block)
            s.pending.append((position, block))
            return
        block_hash = s.chain[position // self._block_size]
        hot = self._retention.hot(self._retention.wish(s.wishes, position))
        if self._states.lookup(block_hash) is None and not self._checkpoint_room(hot):
            self._record.set_fate(block_hash, Loss.NO_CAPACITY)
            return
        self._name(s, position, block)
        previous, s.checkpoint = s.checkpoint, (position, block_hash)
        if previous is not None and previous[0] > s.prefill_end:
            self._give_up(s, *previous)

    def _commit_pending(self, s: CachedSequence) -> None:
        known = [commit for commit in s.pending if commit[0] <= len(s.tokens)]
        s.pending = [commit for commit in s.pending if commit[0] > len(s.tokens)]
        for position, block in known:
            self._commit(s, position, block)
            self._states.release(block)

    def _name(self, s: CachedSequence, position: int, block: int) -> None:
        block_hash = s.chain[position // self._block_size]
        hot = self._retention.hot(self._retention.wish(s.wishes, position))
        if self._states.commit(block, block_hash, exact=position <= s.near_from, hot=hot):
            self._record.clear_fate(block_hash)
            self._stats.states_stored += 1
            self._events.append(CacheEvent("stored", "state", block_hash, position, s.request_id))

    def _give_up(self, s: CachedSequence, position: int, block_hash: bytes) -> None:
        """A decode state that a later one of the same request has made useless, unless somebody uses it."""
        block = self._states.lookup(block_hash)
        if block is None or self._states.references[block] or self._states.hot[block]:
            return
        if self._retention.wish(s.wishes, position) is None:
            self._states.drop(block_hash)

    def _advance(self, s: CachedSequence) -> None:
        """Commits the KV blocks, and records the tokens, that have become full and known."""
        size, known = self._block_size, min(s.computed, len(s.tokens))
        for i in range(s.advanced, known // size):
            block_hash = s.chain[i + 1]
            self._record.add(s.chain[i], s.tokens[i * size : (i + 1) * size].tobytes(), block_hash)
            s.advanced = i + 1
            if not s.store or s.stale:
                continue
            self._index.saw(block_hash)
            if self._kv is None or i < s.kv_shared:
                continue
            if self._kv.commit(s.kv[i], block_hash, exact=(i + 1) * size <= s.near_from, hot=True):
                self._events.append(CacheEvent("stored", "kv", block_hash, (i + 1) * size, s.request_id))

    def _record_tail(self, s: CachedSequence) -> None:
        start = s.advanced * self._block_size
        tail = s.tokens[start : min(s.computed, len(s.tokens))]
        if tail:
            self._record.add(s.chain[s.advanced], tail.tobytes())
