"""Change several parts of the cache together."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count

from mambacache.cache.host_tier import Files, NoFiles, Tier
from mambacache.cache.kv_order import KVOrder
from mambacache.cache.ledger import Ledger, Trace
from mambacache.cache.lookup import Found, Lookup, Prompts, extend_chain, root_hash
from mambacache.cache.pages import Pages
from mambacache.cache.requests import CachedRequest, Residency, Row, Rows
from mambacache.cache.retention import Chains, Policy
from mambacache.cache.slabs import make_pools
from mambacache.cache.states import States
from mambacache.cache.values import Values
from mambacache.config import KV_TOKENS_PER_STATE, CacheConfig
from mambacache.plan import Guess, SequenceStep, Transfer
from mambacache.report import CachedBlock, Hit, RequestReport, Wait

STEPS_IN_FLIGHT = 4
"""Steps to keep rows of freed requests."""


class Admission:
    """Guards changes as a context manager.

    An exception inside a change tears the records. The next call rebuilds them (`mend`) from requests, tokens and
    issued rows, which cannot be torn.
    """

    def __init__(self, config: CacheConfig, files: Files | None) -> None:
        self._config, self._files = config, files if files is not None else NoFiles()
        self.requests: dict[str, CachedRequest] = {}
        self.num_logs = config.num_log_slots or config.num_state_blocks
        self.rows = Rows(self.requests, most_freed=STEPS_IN_FLIGHT * (config.num_state_blocks + self.num_logs))
        self.request_numbers, self._residency_numbers = count(1), count(1)
        self._row_numbers, self._transfer_numbers = count(1), count(1)
        self._prompts, self.torn = Prompts(), False
        self.accepting: list[tuple[Row, int, array[int]]] = []  # rows, counts of tokens known before, new tokens
        self.ledger = Ledger(config.block_size, config.record_tokens, config.accounting)
        most = config.num_state_blocks if config.max_checkpoints is None else config.max_checkpoints
        self._policy = Policy(config.block_size, config.checkpoint_interval, most)
        self.kv_order = KVOrder()
        self.set_up((), num_issued=0)

    def set_up(self, under_way: Iterable[Transfer], num_issued: int) -> None:
        """Start with empty pools; only transfers under way hold blocks."""
        config = self._config
        blocks = config.num_kv_blocks or KV_TOKENS_PER_STATE // config.block_size * config.num_state_blocks
        chains = self.chains = Chains(config.block_size, blocks)
        self.slabs, self.pool, page_pool = make_pools(config, self._state_removed, self._page_removed, chains)
        on_need = self.kv_order.need if config.host_keeps_kv else page_pool.need
        values = Values(self.pool, chains.reuse, on_need)
        page_pool.spill = self.pool.evict_leaf
        self.kv_order.follow(values.needs, self.pool.evict_leaf)
        self.pages = Pages(config.block_size, page_pool, values.needs)
        self.lookup = Lookup(config, self.pool, self.pages, self.ledger)
        self.states = States(
            self.pool,
            self.pages,
            self.lookup,
            self._policy,
            chains,
            values,
            self.ledger,
            self._row_numbers,
            self.num_logs,
            num_issued,
        )
        self.tier = Tier(
            config, self.pool, self.states, self.pages, chains, self.ledger, self._files, self._host_page_removed,
            self._transfer_numbers, under_way,
        )  # fmt: skip

    def __enter__(self) -> Admission:
        self.torn = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.torn = kind is not None

    def chain(self, tokens: array[int], salt: str, keys: Mapping[int, bytes]) -> list[bytes]:
        size = self._config.block_size
        return self._prompts.chain(root_hash(self._config.model_key, size, self._files.key, salt), tokens, size, keys)

    def rehash(self, request: CachedRequest) -> None:
        request.chain = self.chain(request.tokens, request.salt, request.keys)
        request.stale, request.waits = False, None

    def find(self, request: CachedRequest, kv_tokens: int | None, max_tokens: int | None) -> Found:
        """See `PrefixCache.match`."""
        if not request.read:
            return Found()
        size, limit = self._config.block_size, self._limit(request, max_tokens)
        last = (len(request.tokens) - 1) // size
        host_coverage = int(kv_tokens) // size if self._config.host_keeps_kv and kv_tokens is not None else None
        return self.lookup.find(request.chain, limit, last, host_coverage, waits=self._policy.max_checkpoints > 0)

    def _limit(self, request: CachedRequest, max_tokens: int | None) -> int:
        """Return the most blocks to resume after, before the last token."""
        bound = len(request.tokens) - 1
        return (bound if max_tokens is None else min(bound, int(max_tokens))) // self._config.block_size

    def still_waits(self, request: CachedRequest) -> Wait | None:
        """Return the wait of a request, unless it is over."""
        if request.load is not None and not request.load.done:
            return self.tier.loads.wait(request.load)
        if request.waits is None:
            return None
        writer, boundary = request.waits
        gone = writer.ended or writer.request.stale or writer.computed >= boundary
        if gone or self._can_resume(request, boundary // self._config.block_size):
            request.waits = None
            return None
        return Wait("prefix", writer.request.request_id, boundary)

    def _can_resume(self, request: CachedRequest, depth: int) -> bool:
        """Tell whether the state after `depth` blocks, and all KV before it, is known to be cached."""
        chain = request.chain[: depth + 1]
        if self._config.host_keeps_kv or not self.lookup.usable(chain[depth]):
            return False
        return not self.pages.present or self.pages.coverage(chain, self._config.strict_reuse) == depth

    def admit(self, request: CachedRequest, kv_tokens: int | None, max_tokens: int | None) -> Hit | Wait:
        if (wait := self.still_waits(request)) is not None:
            return wait
        self.tier.loads.leave(request)
        if not self.pool.num_available and not self.tier.loads.let_go():
            return Wait("no room")
        found = self.find(request, kv_tokens, max_tokens)
        limit = self._limit(request, max_tokens)
        if request.read and (wait := self.tier.loads.fetch(request, found, limit)) is not None:
            return wait
        if found.writer is not None:
            boundary = found.promised * self._config.block_size
            request.waits = found.writer, boundary
            self._policy.promise(found.writer.wishes, boundary)
            self.ledger.waited()
            return Wait("prefix", found.writer.request.request_id, boundary)
        state = self.pool.lookup(request.chain[found.hit]) or 0 if found.hit else 0
        room = self.pool.num_available - (state > 0 and not self.pool.references[state])  # without the hit itself
        if not room or not self.pages.has_room(request.chain, found.coverage, len(request.tokens)):
            return self.admit(request, kv_tokens, max_tokens) if self.tier.loads.let_go() else Wait("no room")
        hit = self.lookup.hit(request, found)
        self.tier.hit(request.chain[found.hit])
        self.lookup.wait_no_more(request)
        request.resumed = hit.num_tokens
        residency = self._begin(request, hit.num_tokens, len(request.tokens))
        residency.published = residency.written = residency.announced = found.hit
        residency.inexact_from = self.lookup.inexact_from(request, found)
        if request.store:
            self.lookup.writes(residency, request.chain)
        self.pages.begin(residency, request.chain, found.coverage)
        if request.store and request.turn is None:
            request.turn = self.chains.begin(request.chain, found.hit, found.junction, request.prompt_len)
        self.states.begin(residency, state)
        at_end = request.turn is not None and request.turn.at_end and not self.chains.branching
        junction = 0 if at_end else hit.junction  # no other prompt branches off where a turn ended
        residency.marks = self._policy.marks(request.marks, request.prompt_len)
        lengths = request.prompt_len, residency.prefill_end
        residency.wishes = self._policy.wishes(request.marks, residency.marks, junction, lengths)
        self.states.mark(residency, found.coverage * self._config.block_size)
        ceiling = hit.num_tokens + sum(hit.losses.values())
        residency.report = RequestReport(
            residency.prefill_end, hit.num_tokens, ceiling, hit.losses, *request.loaded(found.hit)
        )
        request.loads_anew()
        return hit

    def _begin(self, request: CachedRequest, computed: int, prefill_end: int) -> Residency:
        trace, number = Trace(request.chain[0], request.token_bytes), next(self._residency_numbers)
        residency = Residency(number, request, self.states.num_issued, computed, computed, prefill_end, trace)
        request.residency, request.waits = residency, None
        return residency

    def fork(self, parent: CachedRequest, children: Mapping[str, int], max_running: int | None) -> list[str]:
        size, length = self._config.block_size, parent.prompt_len
        made: dict[str, CachedRequest] = {}
        for child_id, token in children.items():
            tokens = parent.tokens[:length] + array("i", [token])
            chain = parent.chain[: length // size + 1]
            extend_chain(chain, tokens, size, parent.keys)
            made[child_id] = CachedRequest(
                child_id, size, tokens, length, parent.salt, parent.keys, (), parent.read, parent.store, chain,
                next(self.request_numbers), report=parent.report, turn=parent.turn, stale=parent.stale, sound=length,
            )  # fmt: skip
        self.requests.update(made)
        running: list[str] = []
        for child in made.values():
            residency = parent.residency
            if residency is not None and residency.computed == length and len(running) != max_running:
                begun = self._begin(child, length, length)
                if self.states.fork(residency, begun):
                    begun.written = begun.announced = residency.published
                    if child.store and not child.stale:
                        self.lookup.writes(begun, child.chain)
                    running.append(child.request_id)
                    continue
                child.residency = None
            if child.stale:
                self.rehash(child)
            self.lookup.wait(child)
        return running

    def allocate(self, residency: Residency, num_tokens: int, guess: Guess, decode: bool) -> Row | None:
        row = self.states.allocate(residency, num_tokens, guess, decode)
        if row is None and self.tier.loads.let_go():
            row = self.states.allocate(residency, num_tokens, guess, decode)
        if row is not None:
            self.rows[row.step.row] = row
        return row

    def end_residency(self, residency: Residency, finished: bool) -> None:
        """End a residency; its request, unless forgotten, waits for admission."""
        request, row = residency.request, residency.row
        request.residency = None
        if row is not None and row.planned:
            request.leaving = row
        elif row is not None:
            self.rows.pop(row.step.row, None)
        self.states.end(residency, finished)
        if request.stale:
            self.rehash(request)
        if self.requests.get(request.request_id) is request:
            self.lookup.wait(request)

    def forget(self, request: CachedRequest, finished: bool, wrong_from: int | None) -> None:
        if wrong_from is not None:
            self.drop(request.chain[wrong_from // self._config.block_size + 1 :], request.number)
        self.tier.loads.leave(request)
        del self.requests[request.request_id]
        if request.residency is not None:
            self.end_residency(request.residency, finished)
        self.lookup.wait_no_more(request)
        self.rows.free(request)

    def drop(self, block_hashes: Collection[bytes], writer: int | None = None) -> None:
        """Forget these hashes unless another request than `writer` wrote them."""
        for block_hash in block_hashes:
            self.pool.drop(block_hash, writer=writer)
            self.pages.pool.drop(block_hash, writer=writer)
        self.tier.drop(block_hashes, writer)

    def suspects(self, request: CachedRequest) -> list[CachedBlock]:
        """See `PrefixCache.suspects`."""
        size, found = self._config.block_size, list[CachedBlock]()
        for depth in range(request.resumed // size, request.sound // size, -1):
            block_hash = request.chain[depth]
            state, page = (pool.lookup(block_hash) or 0 for pool in (self.pool, self.pages.pool))
            if state or page:
                found.append(CachedBlock(block_hash, state, page))
        return found

    def abandon(self) -> None:
        for row in [row for row in self.rows.values() if not row.issue]:
            self._end_row(row)
        for request in self.requests.values():
            if request.residency is not None:
                self.end_residency(request.residency, finished=False)
                self.ledger.preempted()

    def reset(self) -> None:
        self._files.clear()
        self.pool.clear()
        self.pages.pool.clear()
        self.tier.clear()
        self.lookup.forget_seen()
        for request in self.requests.values():
            request.loads_anew()
            if request.residency is not None:
                self.lookup.wrote(request.residency, request.chain, request.residency.announced)
                request.stale = True
            else:
                self.lookup.wait_no_more(request)
                self.rehash(request)
                self.lookup.wait(request)

    def drop_row(self, row: Row) -> None:
        if row.residency.ended:
            self._end_row(row)
        else:
            del self.rows[row.step.row]
            self.states.drop(row)

    def issued(self, row: Row) -> None:
        residency, request = row.residency, row.residency.request
        if residency.ended:  # its tokens count while the request is known
            self._end_row(row)
            if residency.void or self.requests.get(request.request_id) is not request:
                return
            self.rows[row.step.row] = row
        self.states.num_issued += 1
        row.issue = self.states.num_issued
        if not residency.ended:
            self.states.issued(row)
            residency.ran = True
            if request.report is None and residency.report is not None:
                request.report = residency.report
                self.ledger.ran(residency.report)
        request.issued.append(row)
        request.in_flight += row.step.samples

    def accept(
        self, steps: Sequence[SequenceStep], taken: Sequence[tuple[Row, array[int]]], not_finite: Collection[str]
    ) -> None:
        for step, freed in self.rows.pop_freed(steps):
            if step.request_id in not_finite:
                self.drop(freed.unproven, freed.writer)
        self.accepting = [(row, len(row.residency.request.tokens), tokens) for row, tokens in taken]
        for row, known, tokens in self.accepting:
            residency, request = row.residency, row.residency.request
            del self.rows[row.step.row]
            request.issued.remove(row)
            request.tokens[known:] = tokens
            request.in_flight -= row.step.samples
            if row.step.request_id in not_finite:
                self.drop(request.chain[request.sound // self._config.block_size + 1 :], request.number)
                request.store = False
            elif tokens:
                request.sound = len(request.tokens) - 1
            self.lookup.lengthen(residency)
            if not residency.ended:
                self.states.accept(row)
        self.accepting = []

    def decoded(self, residency: Residency, tokens: array[int]) -> None:
        residency.request.tokens.extend(tokens)
        residency.request.sound = len(residency.request.tokens) - 1
        self.lookup.lengthen(residency)
        residency.computed += len(tokens)
        self.states.num_issued += len(tokens)
        self.ledger.computed(residency.trace, residency.computed)

    def cancel(self, steps: Sequence[SequenceStep], rows: Sequence[Row]) -> None:
        issues = [row.issue for row in rows if row.issue]
        since = min(issues + [freed.issue for _, freed in self.rows.pop_freed(steps)], default=0)
        for row in rows:
            issued = row.residency.request.issued
            if row in issued:
                self._void(row.residency, issued.index(row))  # later rows too
            if not row.residency.ended:
                self.end_residency(row.residency, finished=False)
                self.ledger.preempted()
            if not row.issue:
                self._end_row(row)
        if since:
            self._drop_since(since)

    def _void(self, residency: Residency, first: int) -> None:
        """Ignore the tokens of issued rows from `first` on."""
        request, residency.void = residency.request, True
        for row in request.issued[first:]:
            request.in_flight -= row.step.samples
            del self.rows[row.step.row]
        del request.issued[first:]

    def _end_row(self, row: Row) -> None:
        """End a row that will not be issued or outlived its residency."""
        self.rows.pop(row.step.row, None)
        residency = row.residency
        if not residency.ended:
            self.end_residency(residency, finished=False)
            self.ledger.preempted()
        residency.request.leaving = None
        self.states.release(residency)

    def _drop_since(self, issue: int) -> None:
        """Drop blocks since a failed issue, and preempt requests with a later hit."""
        self.pool.drop_born(issue)
        self.pages.pool.drop_born(issue)
        self.tier.drop_born(issue)
        for request in self.requests.values():
            residency = request.residency
            if residency is not None and (residency.hit or residency.shared_pages) and residency.admitted_at >= issue:
                self._void(residency, 0)
                self.end_residency(residency, finished=False)
                self.ledger.preempted()

    def _state_removed(self, block_hash: bytes, block: int, evicted: bool) -> None:
        self.ledger.removed("state", block_hash, evicted)
        if evicted:
            self.tier.states.restore(block_hash)

    def _page_removed(self, block_hash: bytes, block: int, evicted: bool) -> None:
        self.ledger.removed("kv", block_hash, evicted)
        if evicted and self.tier.pages.lookup(block_hash) is None:
            self._drop_state(block_hash)

    def _host_page_removed(self, block_hash: bytes, slot: int, evicted: bool) -> None:
        self.ledger.removed_from_host("kv", block_hash)
        if evicted and self.pages.pool.lookup(block_hash) is None:
            self._drop_state(block_hash)

    def _drop_state(self, block_hash: bytes) -> None:
        """Drop a state without the KV of its last block."""
        self.pool.drop(block_hash, evicted=True)
        self.tier.states.drop(block_hash)
