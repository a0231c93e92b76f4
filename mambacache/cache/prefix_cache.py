"""`PrefixCache`: the public face of the cache, for this engine's scheduler and for other engines alike."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from mambacache.cache.batch_arrays import build_plan
from mambacache.cache.block_pool import BlockPool
from mambacache.cache.matcher import Hit, Matcher
from mambacache.cache.prefix_index import PrefixIndex, extend_chain, root_hash
from mambacache.cache.report import CacheEvent, CacheStats, ComputedRecord, Loss, RequestReport
from mambacache.cache.retention import Retention, Wish
from mambacache.cache.sequence import CachedSequence
from mambacache.cache.state_planner import StatePlanner
from mambacache.config import CacheConfig
from mambacache.plan import SequenceStep, StepPlan

__all__ = ["Hit", "PrefixCache"]

MAX_EVENTS = 1 << 16


class PrefixCache:
    """Which prefixes are cached where, and which blocks every row of every step reads and writes.

    Host integers only. A request's life: `add`, then `admit` until it returns a hit, then for each step `chunk`,
    `allocate`, and for all rows together `plan`, the forward pass, `issued`, `accept`; at last `free`. Between
    `allocate` and `issued` (or `cancel`) a row's request is neither preempted nor freed. Blocks beside the running
    state are taken only if there are any: without room fewer states are cached, and `None` says that a row or a
    request has to wait, or another one to be preempted.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self._stats = CacheStats()
        self._events: deque[CacheEvent] = deque(maxlen=MAX_EVENTS)
        self._record = ComputedRecord(config.block_size, config.record_tokens)
        self._states = BlockPool(config.num_state_blocks, self._state_removed)
        self._kv = BlockPool(config.num_kv_blocks, self._kv_removed) if config.num_kv_blocks else None
        self._index = PrefixIndex(self._states, self._kv, config.max_seen_blocks, config.strict_reuse)
        self._retention = Retention(config.block_size, config.checkpoint_interval)
        self._planner = StatePlanner(
            config, self._states, self._kv, self._index, self._retention, self._record, self._stats, self._events
        )
        self._sequences: dict[str, CachedSequence] = {}
        self._running: dict[str, CachedSequence] = {}
        self._matcher = Matcher(config, self._states, self._kv, self._index, self._record, self._running)
        self._generation = 0

    # --- requests ---

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        checkpoint_at: Iterable[int] = (),
        read: bool = True,
        store: bool = True,
    ) -> None:
        """Hashes a prompt; takes no block.

        Args:
            salt: requests with different salts share nothing.
            checkpoint_at: token positions, rounded down to blocks, whose state is worth a block.
            read: whether the request may use what is cached.
            store: whether what it computes is cached.

        Raises:
            ValueError: the prompt is empty, or the id is taken.
        """
        if not len(token_ids):
            raise ValueError(f"request {request_id!r} has an empty prompt: give it at least one token")
        if request_id in self._sequences:
            raise ValueError(f"request id {request_id!r} is in use: choose another, or free that request first")
        size = self.config.block_size
        marks = tuple(position // size * size for position in checkpoint_at)
        tokens = array("i", token_ids)
        s = CachedSequence(request_id, tokens, len(tokens), salt, marks, read, store, self._chain(tokens, salt))
        self._sequences[request_id] = s

    def match(self, request_id: str, *, kv_tokens: int | None = None) -> Hit:
        """Looks up what a request would hit now; changes nothing.

        Args:
            kv_tokens: tokens that the host's own KV covers; required if the model has attention and the host keeps KV.
        """
        s = self._sequences[request_id]
        match = self._matcher.match(s, kv_tokens)
        promise = self._matcher.find_writer(s, match)
        return self._matcher.hit(s, match, None if promise is None else promise.writer.request_id)

    def admit(self, request_id: str, *, kv_tokens: int | None = None) -> Hit | None:
        """Takes references to all that is hit, and a block for the running state, in one act.

        Returns:
            None, and nothing is taken: there is no room, or another request computes the prefix (`waits_for` tells).
        """
        s = self._sequences[request_id]
        if s.running or s.in_flight or self._matcher.still_waits(s):
            return None
        s.waits = None
        if not self._states.num_available:
            return None
        match = self._matcher.match(s, kv_tokens)
        s.waits = self._matcher.find_writer(s, match)
        if s.waits is not None:
            s.waits.writer.wishes[s.waits.boundary] = Wish.PROMISED
            self._stats.waits += 1
            return None
        hit_block = self._states.lookup(s.chain[match.hit]) or 0 if match.hit else 0
        shared = self._matcher.shared_kv(s, match)
        if not self._has_room(s, hit_block, shared):
            return None
        hit = self._matcher.hit(s, match)
        if s.report is None:
            ceiling = hit.num_tokens + sum(hit.losses.values())
            s.report = RequestReport(len(s.tokens), hit.num_tokens, ceiling, hit.losses)
            self._stats.add(s.report)
        s.near_from = self._matcher.near_from(s, match)
        self._planner.admit(s, hit_block, hit.num_tokens, shared)
        s.wishes = self._wishes(s, hit.junction)
        self._running[request_id] = s
        return hit

    def waits_for(self, request_id: str) -> str | None:
        """The request whose progress made the last `admit` of this one return None; None if it was lack of room."""
        waits = self._sequences[request_id].waits
        return None if waits is None else waits.writer.request_id

    def report(self, request_id: str) -> RequestReport | None:
        """What the cache did for the request at its first admission; None before it."""
        return self._sequences[request_id].report

    def fork(self, request_id: str, children: Mapping[str, int], *, max_running: int | None = None) -> list[str]:
        """More answers to a prompt that was just computed: they share its last state and its full KV blocks.

        Called after the `accept` that gave the request its first answer token, before it runs on.

        Args:
            children: for each further answer its request id and its own first token.
            max_running: how many of them may run now; None for all.

        Returns:
            The ids that run now. The others, for which there is no room, are known, and wait for `admit`.
        """
        parent = self._sequences[request_id]
        running: list[str] = []
        for child_id, token in children.items():
            tokens = parent.tokens[: parent.prompt_len] + array("i", [token])
            chain = parent.chain[: parent.prompt_len // self.config.block_size + 1]
            extend_chain(chain, tokens, self.config.block_size)
            child = CachedSequence(
                child_id, tokens, parent.prompt_len, parent.salt, (), parent.read, parent.store, chain,
                report=parent.report, stale=parent.stale,
            )  # fmt: skip
            self._sequences[child_id] = child
            if parent.running and len(running) != max_running and self._planner.fork(parent, child):
                self._running[child_id] = child
                running.append(child_id)
            else:
                self._rehash_if_stale(child)
        return running

    def preempt(self, request_id: str) -> None:
        """Takes a running request's blocks; it stays known with its tokens and waits for `admit` again."""
        s = self._running.pop(request_id)
        self._planner.release(s, finished=False)
        self._rehash_if_stale(s)
        self._stats.preemptions += 1

    def free(self, request_id: str, *, finished: bool) -> None:
        """Forgets a request; what it committed stays. `finished` is False for an aborted one."""
        s = self._sequences.pop(request_id)
        if self._running.pop(request_id, None) is not None:
            self._planner.release(s, finished=finished)

    # --- steps ---

    def chunk(self, request_id: str, budget: int) -> int:
        """How many tokens to run now, 1 to `budget`: all that is left of the prompt, else up to the last boundary in
        reach, else the whole budget; 1 for a decoding request."""
        s = self._running[request_id]
        left = s.prefill_end - s.computed
        if left <= 1 or left <= budget:
            return max(left, 1)
        size = self.config.block_size
        aligned = (s.computed + budget) // size * size - s.computed
        return aligned if aligned > 0 else budget

    def allocate(self, request_id: str, num_tokens: int, *, drafts: Sequence[int] = ()) -> SequenceStep | None:
        """The row that runs the next `num_tokens` tokens and then `drafts`, with a block for each state it writes.

        After a row with drafts, the next one can be allocated once `accept` was told which of them agreed.

        Returns:
            None, and nothing has changed: there is no room.
        """
        return self._planner.allocate(self._running[request_id], num_tokens, tuple(drafts))

    def plan(self, steps: Sequence[SequenceStep]) -> StepPlan:
        """The step of all these rows: adds checkpoints inside them and lays out the arrays."""
        rows = [(self._running[step.request_id], step) for step in steps]
        self._planner.add_checkpoints(rows)
        plan = build_plan(rows, self._planner.table, self.config.block_size)
        plan.kv_copies = tuple((s.kv_source, s.kv[s.kv_shared]) for s, _ in rows if s.kv_source)
        return plan

    def issued(self, plan: StepPlan) -> None:
        """The forward pass is on the stream: what consists of known tokens becomes readable for later steps."""
        for step in plan.steps:
            s = self._running.get(step.request_id)
            if s is not None:
                self._planner.issued(s, step)

    def accept(self, plan: StepPlan, token_ids: Mapping[str, Sequence[int]]) -> None:
        """The step's tokens have been read.

        Args:
            token_ids: for each request that sampled, the tokens that remain after stops, a stop token included. A
                request that stopped runs no further step.
        """
        for step in plan.steps:
            s = self._sequences.get(step.request_id)
            if s is not None:
                self._planner.accept(s, step, token_ids.get(step.request_id, ()))

    def cancel(self, plan: StepPlan) -> None:
        """Issuing the step failed: nothing of it is committed, and all its requests are preempted."""
        for step in plan.steps:
            s = self._running.pop(step.request_id, None)
            if s is not None:
                self._planner.cancel(s, step)
                self._rehash_if_stale(s)
                self._stats.preemptions += 1

    # --- the cache as a whole ---

    @property
    def stats(self) -> CacheStats:
        """Totals, and how many blocks are in use at this moment."""
        self._stats.state_blocks = self._states.counts()
        self._stats.kv_blocks = self._kv.counts() if self._kv is not None else {}
        return self._stats

    def block_row(self, request_id: str) -> list[int]:
        """The request's states as a row of a sparse block table: column i is the state after block i, 0 is null."""
        s = self._running[request_id]
        if not s.computed:
            return []
        column = (s.computed - 1) // self.config.block_size
        row = [self._states.lookup(block_hash) or 0 for block_hash in s.chain[1 : column + 1]]
        return [*row, *[0] * (column - len(row)), s.state]  # hashes of tokens in flight are not known

    def reset(self) -> None:
        """Drops all that is cached, as after a change of weights; running requests finish, and commit nothing more."""
        self._generation += 1
        self._states.clear()
        if self._kv is not None:
            self._kv.clear()
        self._index.clear()
        for s in self._sequences.values():
            s.stale = True
            if not s.running:
                self._rehash_if_stale(s)

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, oldest first; the latest 65,536 are kept."""
        events = list(self._events)
        self._events.clear()
        return events

    # --- inside ---

    def _chain(self, tokens: array[int], salt: str) -> list[bytes]:
        config = self.config
        chain = [root_hash(config.model_key, config.block_size, config.max_draft_tokens, self._generation, salt)]
        extend_chain(chain, tokens, config.block_size)
        return chain

    def _rehash_if_stale(self, s: CachedSequence) -> None:
        if s.stale:
            s.stale, s.waits = False, None
            s.chain = self._chain(s.tokens, s.salt)

    def _has_room(self, s: CachedSequence, hit_block: int, shared: Sequence[int]) -> bool:
        """Whether the state pool has a block and the KV pool all blocks that the known tokens need, beside what will
        be shared and what admitted prompts still lack."""
        if self._states.num_available - (hit_block > 0 and not self._states.references[hit_block]) < 1:
            return False
        if self._kv is None:
            return True
        size, kv = self.config.block_size, self._kv
        lacking = sum(max(0, -(-r.prefill_end // size) - len(r.kv)) for r in self._running.values())
        idle = sum(not kv.references[block] for block in shared)
        return -(-len(s.tokens) // size) - len(shared) <= kv.num_available - idle - lacking

    def _wishes(self, s: CachedSequence, junction: int) -> dict[int, Wish]:
        wishes = dict.fromkeys(s.marks, Wish.MARKED)
        if junction:
            wishes[junction] = Wish.JUNCTION
        for length in (s.prompt_len, s.prefill_end):
            wishes[self._retention.tail(length)] = Wish.TAIL
        return wishes

    def _state_removed(self, block_hash: bytes, block: int, evicted: bool) -> None:
        self._events.append(CacheEvent("removed", "state", block_hash, 0, ""))
        if evicted:
            self._record.set_fate(block_hash, Loss.EVICTED)
            self._stats.states_evicted += 1

    def _kv_removed(self, block_hash: bytes, block: int, evicted: bool) -> None:
        self._events.append(CacheEvent("removed", "kv", block_hash, 0, ""))
        if evicted:
            self._record.set_fate(block_hash, Loss.EVICTED)
            self._stats.kv_evicted += 1
            self._states.drop(block_hash, evicted=True)
