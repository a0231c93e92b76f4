"""Run mixes of requests through `PrefixCache` and `Scheduler` on the symbolic model, and check every move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cache_model import CacheModel, Prefix, common_prefix
from mambacache.cache.host_tier import Files
from mambacache.cache.pool import BlockPool
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.cache.requests import CachedRequest, Residency
from mambacache.config import CacheConfig, SamplingParams
from mambacache.plan import PLACEHOLDER, SequenceStep, StepPlan
from mambacache.report import CacheEvent, Hit, Wait
from mambacache.scheduler.drafts import DraftTree, one_by_one
from mambacache.scheduler.request import FinishReason, Request
from mambacache.scheduler.scheduler import Scheduler
from symbolic import StepFailed, SymbolicRunner, Written, answer, true_page, true_state
from symbolic_jobs import Job, Mix
from traced import traced

MAX_STEPS = 20_000


def unheld(pool: BlockPool) -> list[int]:
    """Return the blocks that are free, or that the pool has no memory for."""
    return [b for b, count in enumerate(pool.references) if not count and pool.hashes[b] is None]


class CheckedCache(PrefixCache):
    """Check admissions with `CacheModel`, stored blocks with their tokens, and plans with the requested states."""

    def __init__(self, config: CacheConfig, files: Files | None = None) -> None:
        super().__init__(config, files)
        self.model = CacheModel(config.block_size, config.strict_reuse, config.has_attention)
        self.runner = SymbolicRunner(
            config.num_state_ids - 1,
            config.num_page_ids - 1,
            num_log_slots=config.num_log_slots,
            block_size=config.block_size,
            may_write_state=lambda block: self.states.hashes[block] is None and self.states.references[block] == 1,
            may_write_page=lambda block: self.kv is not None and self.kv.hashes[block] is None,
        )
        self.hits: list[tuple[str, Hit]] = []
        self.rebuilt = 0
        self._events_seen = 1  # the number of the last event
        self._owners: dict[str, CachedRequest] = {}
        self._names: dict[tuple[str, bytes], Prefix] = {}
        self._on_host: set[tuple[str, bytes]] = set()
        self._consumed: dict[int, int] = {}
        self._wanted: dict[int, set[int]] = {}  # positions of requested states, by residency

    @property
    def states(self) -> BlockPool:
        return self._admission.pool

    @property
    def kv(self) -> BlockPool | None:
        return self._admission.pages.pool if self.config.num_kv_blocks else None

    def quietly(self, call: Callable[[], Any]) -> Any:
        """Make a call for a check; no fault is planted in it."""
        with traced(None):
            return call()

    def _ready(self) -> None:
        """Let the cache rebuild its records if it must, and feed the model with its events."""
        self.quietly(lambda: self._admission)
        self.sync()

    def add(self, request_id: str, token_ids: Sequence[int], **options: Any) -> None:
        super().add(request_id, token_ids, **options)
        self._owners[request_id] = self._admission.requests[request_id]

    def admit(self, request_id: str, *, kv_tokens: int | None = None, max_tokens: int | None = None) -> Hit | Wait:
        if (known := self._admission.requests.get(request_id)) is None or known.residency is not None:
            return super().admit(request_id, kv_tokens=kv_tokens, max_tokens=max_tokens)
        self._ready()
        s = self._admission.requests[request_id]
        prompt = s.salt, s.tokens.tobytes()
        hit, coverage, junction = self.model.match(prompt, kv_tokens) if s.read else (0, 0, 0)
        ceiling = self.model.ceiling(prompt, hit)
        exact = None if self._admission.lookup._host_kv and hit else self.model.exact(prompt, hit)
        looked = self.quietly(lambda: self.match(request_id, kv_tokens=kv_tokens))
        writer, waits = self._writer(s, hit), s.waits
        found = super().admit(request_id, kv_tokens=kv_tokens)
        self.sync()
        assert (looked.num_tokens, looked.junction, looked.exact) == (hit, junction, exact)
        assert sum(looked.losses.values()) == ceiling - hit, f"{looked}, but the ceiling is {ceiling}"
        assert min(looked.losses.values(), default=1) > 0
        if isinstance(found, Wait):
            assert s.residency is None
            if s.waits is not None and s.waits is not waits:
                writing, boundary = s.waits
                assert found == Wait("prefix", writing.request.request_id, boundary)
                self._check_wait(s, writing, hit)
                self._wanted.setdefault(writing.number, set()).add(boundary)
            assert found.reason != "no room" or not self._has_room(s, hit, coverage), "there is room"
            return found
        assert writer is None, f"{request_id} runs though {writer} computes its prefix"
        assert (found.num_tokens, found.junction, found.exact) == (hit, junction, exact)
        assert found.losses == looked.losses
        assert s.residency is not None and s.residency.report is not None
        if self.kv is not None:
            assert s.residency.shared_pages * self.config.block_size == coverage
        report = s.residency.report
        assert sum(report.losses.values()) == report.ceiling - report.hit
        assert self._lacking() <= self._available(self.kv) + self._pages_for_states(hit), (
            "a prompt runs without pages for it"
        )
        # With shared memory its pages may lie in the last slab that its state could take.
        taken = self.config.slab is not None and not self._available(self.states)
        assert s.residency.reserve is not None or taken, "a prompt runs without a block for its state"
        self._wanted[s.residency.number] = self._asked_for(s, junction)
        self.hits.append((request_id, found))
        return found

    def plan_rows(self, steps: Sequence[SequenceStep]) -> tuple[SequenceStep, ...]:
        self.sync()
        before = dict(self.model.states)
        planned = super().plan_rows(steps)
        self.sync()
        self.quietly(lambda: self._check_planned(planned, before))
        return planned

    def allocate(self, request_id: str, num_tokens: int, **options: Any) -> SequenceStep | None:
        step = super().allocate(request_id, num_tokens, **options)
        self.sync()
        return step

    def plan(self, steps: Sequence[SequenceStep]) -> StepPlan:
        plan = super().plan(steps)
        self.sync()
        return plan

    def issued(self, steps: Sequence[SequenceStep]) -> None:
        rows = [row for step in steps if (row := self._admission.rows.get(step.row)) is not None]
        super().issued(steps)
        for row in [row for row in rows if not row.residency.ended and not row.step.unplaced_by]:
            self._computes(row.residency, row.step, 1 if row.step.drafts else row.step.num_tokens)
        self.sync()
        for row in [row for row in rows if row.step.prefill and not row.residency.ended]:
            self._check_kept(row.residency, row.step.start + row.step.num_tokens)
        self.quietly(self.check)

    def accept(
        self, steps: Sequence[SequenceStep], token_ids: Mapping[str, Sequence[int]], *, not_finite: Iterable[str] = ()
    ) -> None:
        rows = [row for step in steps if (row := self._admission.rows.get(step.row)) is not None]
        super().accept(steps, token_ids, not_finite=not_finite)
        for row in [row for row in rows if not row.residency.ended]:
            residency, step = row.residency, row.step
            given = token_ids.get(step.request_id, ())  # one token more than the accepted drafts
            agreed = len(step.followed(given if PLACEHOLDER not in step.drafts else given[:-1])) - 1
            self._computes(residency, step, agreed + 1 if step.drafts else step.num_tokens)
            if residency.computed > step.start + agreed + 1:  # the next row is in flight, and begins here
                self._computes(residency, step._replace(start=residency.computed), 0)
        self.sync()
        self.quietly(self.check)

    def fork(self, request_id: str, children: Mapping[str, int], *, max_running: int | None = None) -> list[str]:
        running = super().fork(request_id, children, max_running=max_running)
        for child in children:
            self._owners[child] = self._admission.requests[child]
        self.sync()
        return running

    def cancel(self, steps: Sequence[SequenceStep]) -> None:
        self._ready()
        held = self.committed()
        rows = self._admission.rows
        issued = any(step.row in rows.freed or (step.row in rows and rows[step.row].issue) for step in steps)
        super().cancel(steps)
        assert issued or held <= self.committed(), "a failed step removes cached blocks"
        self.sync()
        self.quietly(self.check)

    def preempt(self, request_id: str) -> None:
        self._ready()
        held = self.committed()
        super().preempt(request_id)
        assert held <= self.committed(), "a preemption removes a cached block"
        self.sync()

    def free(self, request_id: str, *, finished: bool, wrong_from: int | None = None) -> None:
        self._ready()
        held = self.committed()
        super().free(request_id, finished=finished, wrong_from=wrong_from)
        assert wrong_from is not None or held <= self.committed(), "a request that ends removes a cached block"
        self.sync()

    def reset(self) -> None:
        super().reset()
        self.sync()
        self.model.clear()
        assert not self.model.states and not self.model.kv

    # --- the checks ---

    def committed(self) -> set[bytes]:
        """Return the hashes of the cached states and KV blocks."""
        hashes = [*self.states.hashes, *(self.kv.hashes if self.kv is not None else ())]
        return {block_hash for block_hash in hashes if block_hash is not None}

    def sync(self) -> None:
        self.quietly(self._sync)

    def _sync(self) -> None:
        """Feed the model with the cache's events, and poison the free blocks."""
        self._owners |= self._admission.requests
        events = self.take_events()
        lost = self._admission.ledger._num_events - len(events) - self._events_seen
        if lost:  # the cache rebuilt its records
            first = self._events_seen + lost + 1
            events = [event for i, event in enumerate(events) if event.number == first + i]
            self.model.states.clear()
            self.model.kv.clear()
            self.model.clear()
            self._names.clear()
            self._on_host.clear()
            self._consumed.clear()
            self.rebuilt += 1
        for event in events:
            if event.on_host:
                assert (event.action == "removed") is ((event.kind, event.block_hash) in self._on_host)
                self._on_host ^= {(event.kind, event.block_hash)}
                continue
            held = self.model.states if event.kind == "state" else self.model.kv
            if event.action == "removed":
                self.model.remove(event.kind, self._names.pop((event.kind, event.block_hash)))
                continue
            prefix = self.prefix_of(event)
            assert prefix not in held
            self._names[event.kind, event.block_hash] = prefix
            held[prefix] = self._check_stored(event.kind, event.block_hash, prefix[1])
        self._events_seen = self._admission.ledger._num_events
        slots = {"state": self._admission.tier.states._blocks, "kv": self._admission.tier.pages._blocks}
        assert self._on_host == {(kind, block_hash) for kind, blocks in slots.items() for block_hash in blocks}
        num_kv = self.kv.num_committed if self.kv is not None else 0
        self.model.check(self.states.num_committed, num_kv, self.kv_elsewhere())
        if self._admission.slabs is not None:
            self._admission.slabs.check()
        self.runner.written[unheld(self.states)] = False
        if self.kv is not None:
            self.runner.kv_written.reshape(-1, self.config.block_size)[unheld(self.kv)] = False

    def prefix_of(self, event: CacheEvent) -> Prefix:
        """Return the stored prefix, and check that its request may store it."""
        s = self._owners[event.request_id]
        assert s.store and not s.stale, "a request that may not store stores"
        assert event.num_tokens <= len(s.tokens), "a block of unknown tokens is readable"
        return s.salt, s.tokens.tobytes()[: event.num_tokens * 4]

    def kv_elsewhere(self) -> set[Prefix]:
        """Return the prefixes that keep the KV of their last block elsewhere than on the device."""
        return set()

    def check_contents(self) -> None:
        """Check that every committed block still holds the tokens that its hash names."""
        for (kind, block_hash), prefix in self._names.items():
            self._check_stored(kind, block_hash, prefix[1])

    def check_no_leak(self) -> None:
        """Check that every block is free or evictable once no request is left."""
        assert not self._admission.requests and not self._admission.rows
        self.check()
        for pool in filter(None, (self.states, self.kv)):
            assert not any(pool.references)
            assert pool.counts()["writing"] == 0
            assert pool.counts()["evictable"] == pool.num_committed

    def _check_stored(self, kind: str, block_hash: bytes, tokens: bytes) -> bool:
        runner, count = self.runner, len(tokens) // 4
        if kind == "state":
            block = self.states.lookup(block_hash)
            if block is None:
                return False  # a later event removes it
            digest, window = true_state(tokens, count)
            assert runner.written[block] and int(runner.states[block]) == digest, "a state of other tokens is committed"
            assert runner.windows[block].tolist() == window, "a conv window of other tokens is committed"
            exact = bool(runner.exact[block])
            assert self.states.exact[block] == exact
            return exact
        assert self.kv is not None
        block = self.kv.lookup(block_hash)
        if block is None:
            return False
        size = self.config.block_size
        page = slice(block * size, (block + 1) * size)
        held = runner.kv_digests[page]
        assert runner.kv_written[page].all()
        assert (held == true_page(tokens, count - size, count)).all(), "KV of other tokens is committed"
        exact = bool(runner.kv_exact[page].all())
        assert self.kv.exact[block] == exact
        return exact

    def _computes(self, residency: Residency, step: SequenceStep, count: int) -> None:
        """Note that a step has consumed `count` of its tokens. The last token may become known later."""
        s = residency.request
        if s.stale:
            return
        self._consumed[residency.number] = end = max(self._consumed.get(residency.number, 0), step.start + count)
        tokens = s.tokens.tobytes()[: end * 4]
        self.model.computes(f"{s.request_id} {residency.number}", (s.salt, tokens))
        size = self.config.block_size
        for end in range(len(tokens) // 4 // size * size, residency.hit, -size) if s.store else ():
            if (prefix := (s.salt, tokens[: end * 4])) in self.model.seen:
                break
            self.model.seen.add(prefix)

    # --- room ---

    def _available(self, pool: BlockPool | None) -> int:
        """Count the blocks without a holder. With shared memory, add the blocks that the other pool can give."""
        if pool is None:
            return 0
        return pool.num_available if self._admission.slabs is not None else pool.references[1:].count(0)

    def _pages_for_states(self, hit: int) -> int:
        """Count the pages that an admission may lose: a slab for the state that it takes, and for its hit."""
        return self.config.slab[1] * (1 + (hit > 0)) if self.config.slab is not None else 0

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _lacking(self) -> int:
        """Count the pages that the running prompts have yet to take."""
        residencies = [
            request.residency for request in self._admission.requests.values() if request.residency is not None
        ]
        lacks = [self._blocks(residency.prefill_end) - len(residency.pages) for residency in residencies]
        return sum(max(each, 0) for each in lacks) if self.kv is not None else 0

    def _has_room(self, s: CachedRequest, hit: int, coverage: int) -> bool:
        """Return whether there is a block for a request's running state, and a page for each of its blocks."""
        size, idle = self.config.block_size, 0
        held = self.states.lookup(s.chain[hit // size]) if hit else None
        states = self._available(self.states) - (held is not None and not self.states.references[held])
        if self.kv is None or not states:
            return states > 0
        for block_hash in s.chain[1 : coverage // size + 1]:
            page = self.kv.lookup(block_hash)
            idle += page is not None and not self.kv.references[page]
        own = self._blocks(len(s.tokens)) - coverage // size
        return own <= self._available(self.kv) - idle - self._lacking()

    # --- requested states ---

    def _asked_for(self, s: CachedRequest, junction: int) -> set[int]:
        """Return the positions where an admitted request leaves a state, if there is room.

        They are the last boundaries of its prompt and of all its tokens, the junction, and the marks.
        """
        size, turn = self.config.block_size, s.turn
        lengths = s.prompt_len, len(s.tokens)
        wanted = {(length - 1) // size * size for length in lengths}
        if turn is None or not turn.at_end or self._admission.chains.branching:  # else no other prompt branches there
            wanted.add(junction)
        most = self.config.max_checkpoints if self.config.max_checkpoints is not None else self.config.num_state_blocks
        marks = sorted({*s.marks} - {0}, key=lambda position: (abs(position - s.prompt_len), position))
        return wanted | {*marks[: max(min(8, most // 4), 1)]}

    def _check_planned(self, planned: Sequence[SequenceStep], before: Mapping[Prefix, bool]) -> None:
        """Check each requested state inside a row: this step writes it, it was cached before, or there is no room.

        The step may evict a cached state for a state of higher value.
        """
        residencies = {step.row: self._admission.rows[step.row].residency for step in planned}
        written = {
            self._prefix(residencies[step.row], p): p <= residencies[step.row].inexact_from
            for step in planned
            for p in step.checkpoints
        }
        for step in [step for step in planned if step.prefill]:
            residency, end = residencies[step.row], step.start + step.num_tokens
            for position in (
                sorted(self._wanted.get(residency.number, ()))
                if residency.request.store and not residency.request.stale
                else ()
            ):
                if step.start < position < end:
                    prefix = self._prefix(residency, position)
                    cached = before if written else self.model.states  # a written state may have evicted it
                    there = [held[prefix] for held in (written, cached) if prefix in held]
                    assert any(there) or (there and position > residency.inexact_from) or self._full(), (
                        "a state is not written"
                    )

    def _check_kept(self, residency: Residency, end: int) -> None:
        """Check that a requested state where a step ends is cached, unless the checkpoint budget is spent."""
        stores = residency.request.store and not residency.request.stale
        if stores and end in self._wanted.get(residency.number, ()):
            assert self._prefix(residency, end) in self.model.states or self._spent(), "a state is not kept"

    def _prefix(self, residency: Residency, position: int) -> Prefix:
        return residency.request.salt, residency.request.tokens.tobytes()[: position * 4]

    def _full(self) -> bool:
        """Return whether no state can be added, even by an eviction for a requested state."""
        return not self._available(self.states) or (self._spent() and not len(self.states.idle))

    def _spent(self) -> bool:
        """Return whether the checkpoint budget is spent, or will be once all planned rows have run."""
        most = self.config.max_checkpoints
        unwritten = sum(len(row.checkpoints) for row in self._admission.rows.values() if not row.issue)
        return most is not None and self.states.num_committed + unwritten >= most

    # --- requests that compute the same prefix ---

    def _writer(self, s: CachedRequest, hit: int) -> str | None:
        """Return a request that is about to compute a longer prefix of `s` than its hit."""
        if not s.read or self.config.max_checkpoints == 0 or self.config.strict_reuse:
            return None
        for other in self._admission.requests.values():
            if (residency := other.residency) is None:
                continue
            writes = other.store and not other.stale and other.salt == s.salt
            if writes and self._shared(s, other) > max(hit, residency.computed):
                return other.request_id
        return None

    def _shared(self, s: CachedRequest, other: CachedRequest) -> int:
        common = min(common_prefix(s.tokens.tobytes(), other.tokens.tobytes()), len(s.tokens) - 1)
        return common // self.config.block_size * self.config.block_size

    def _check_wait(self, s: CachedRequest, residency: Residency, hit: int) -> None:
        other = residency.request
        assert other.residency is residency
        assert s.read and other.store and not other.stale and self.config.max_checkpoints != 0
        assert self._shared(s, other) > max(hit, residency.computed)


class Driver:
    """Run a mix to its end. `requests` is keyed by job and answer."""

    def __init__(self, mix: Mix) -> None:
        self.mix = mix
        self.config = CacheConfig(**mix.cache)
        self.cache = CheckedCache(self.config)
        self.scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=mix.budget,
            max_num_seqs=mix.max_num_seqs,
            long_prefill_token_threshold=mix.long_prefill,
            draft=one_by_one(self._draft) if mix.draft_errors is not None else None,
        )
        self.requests: dict[tuple[int, int], Request] = {}
        self.steps = 0
        self.tokens_computed = 0
        self.plans: deque[tuple[StepPlan, list[list[int]]]] = deque()
        self.wrote: dict[int, Written] = {}  # by id() of the plan in flight
        self.doomed: StepPlan | None = None  # the plan that fails when it is read
        self._expected: dict[str, list[int]] = {}

    def run(self) -> Driver:
        mix = self.mix
        arrivals = sorted(range(len(mix.jobs)), key=lambda i: mix.jobs[i].arrives)
        while arrivals or not self.scheduler.idle or self.plans:
            assert self.steps < MAX_STEPS, "no progress"
            while arrivals and mix.jobs[arrivals[0]].arrives <= self.steps:
                self.submit(arrivals.pop(0))
            for index, job in enumerate(mix.jobs):
                for k in range(job.n if job.aborts is not None and job.aborts <= self.steps else 0):
                    self.abort(f"{index}.{k}")
            if self.steps in mix.resets:
                self.cache.reset()
            self.step()
            self.steps += 1
        self.check()
        return self

    def submit(self, index: int) -> None:
        job = self.mix.jobs[index]
        params = SamplingParams(
            max_tokens=job.max_tokens, salt=job.salt, n=job.n, checkpoint_at=job.marks,
            read_cache=job.read, store_cache=job.store,
        )  # fmt: skip
        answers = [Request(f"{index}.{k}", job.prompt, params, frozenset(job.stop)) for k in range(job.n)]
        answers[0].siblings = answers[1:]
        for k, request in enumerate(answers):
            self.requests[index, k] = request
            self._expected[request.request_id] = self.expected(job, k)
        self.scheduler.add(answers[0])

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def expected(self, job: Job, k: int = 0) -> list[int]:
        return answer(job.prompt, job.max_tokens, attention=self.config.num_kv_blocks > 0, stop=job.stop, branch=k)

    def step(self) -> None:
        """Schedule and issue a step, and read the oldest step if more than `ahead` are in flight."""
        plan = self.schedule()
        if plan is None:
            waits = not self.plans and self.wait()
            assert self.plans or waits or self.scheduler.idle, (
                "requests are left, nothing is in flight, and nothing runs"
            )
            if self.plans:
                self.read()
            return
        assert 0 < sum(step.num_tokens for step in plan.steps) <= self.mix.budget
        assert len(self.scheduler._running) <= self.mix.max_num_seqs
        wanted = [self._answers(step) for step in plan.steps]
        bad = self.mix.bad is not None and any(step.request_id == f"{self.mix.bad}.0" for step in plan.steps)
        try:
            outputs = self.cache.runner.execute(plan, wanted, fail=bad or self.steps in self.mix.fails)
        except StepFailed as error:
            alone = [step.request_id for step in plan.steps] if len(plan.steps) == 1 else []
            ended = [r.request_id for r in self.scheduler.failed(plan, error) if r.finish_reason is FinishReason.ERROR]
            siblings = {name for name in ended if name.split(".")[0] in {each.split(".")[0] for each in alone}}
            assert set(alone) <= set(ended) == siblings  # answers that have not begun end with the first answer
            return
        self.tokens_computed += sum(step.num_tokens for step in plan.steps)
        self.scheduler.issued(plan)
        self.plans.append((plan, outputs))
        if self.steps in self.mix.late_fails:
            self.doomed = plan
        self.wrote[id(plan)] = self.cache.runner.wrote
        if len(self.plans) > self.mix.ahead:
            self.read()

    def schedule(self) -> StepPlan | None:
        return self.scheduler.schedule()

    def wait(self) -> bool:
        """Wait for work beside the steps; return False if there is none."""
        return False

    def read(self) -> None:
        if self.plans[0][0] is self.doomed:
            self.fail_all()
            return
        plan, outputs = self.plans.popleft()
        self.wrote.pop(id(plan), None)
        self.scheduler.update(plan, outputs)
        for request in self.scheduler._running:
            assert self.cache.runs(request.request_id)

    def fail_all(self) -> None:
        """Fail all steps in flight, and poison the blocks that they wrote."""
        error: Exception | None = StepFailed("the step fails on the device")
        for plan, _ in self.plans:
            self.cache.runner.tear(self.wrote.pop(id(plan)))
        while self.plans:
            self.scheduler.failed(self.plans.popleft()[0], error)
            error = None

    def check(self) -> None:
        """Check the tokens of every request, that no block leaked, and that no committed block changed."""
        self.cache.check_no_leak()
        self.cache.check_contents()
        for (index, k), request in self.requests.items():
            job, expected = self.mix.jobs[index], self._expected[request.request_id]
            assert request.finish_reason is not None
            if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert request.output == expected[: len(request.output)]
                assert job.aborts is not None or request.error
                continue
            assert request.output == expected, f"{index}.{k}"
            at_stop = request.output[-1] in job.stop
            assert request.finish_reason is (FinishReason.STOP if at_stop else FinishReason.LENGTH)

    def hit(self, index: int, k: int = 0) -> int:
        """Return the prompt tokens that a job did not compute at its first admission."""
        report = self.requests[index, k].report
        assert report is not None
        return report.hit

    def _answers(self, step: SequenceStep) -> range:
        if not step.samples:
            return range(0)
        request = self.scheduler.requests[step.request_id]
        k = int(step.request_id.split(".")[1]) if not request.output else 0  # not forked: begins alone
        return range(k, k + 1 + len(request.siblings))

    def _draft(self, request: Request, limit: int) -> list[int] | DraftTree:
        done = len(request.output)
        return self.mix.drafts(self._expected[request.request_id][done : done + limit], done)


def run(jobs: Iterable[Job], **options: Any) -> Driver:
    """Run jobs; options are fields of `Mix`, and all others of `CacheConfig`."""
    cache: dict[str, Any] = {"num_state_blocks": 64, "num_kv_blocks": 256}
    mix: dict[str, Any] = {}
    for name, value in options.items():
        (mix if name in Mix.__dataclass_fields__ else cache)[name] = value
    return Driver(Mix(list(jobs), cache=cache, **mix)).run()
