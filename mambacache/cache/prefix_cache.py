"""`PrefixCache`: the public face of the cache, for this engine's scheduler and for other engines alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mambacache.cache.admission import Admission
from mambacache.cache.host_tier import Files, check_under_way
from mambacache.cache.repair import check, mend, totals
from mambacache.cache.requests import CachedRequest, Residency, check_decoded, check_fork, check_next_row
from mambacache.checks import (
    block_keys,
    boundaries,
    check_bounds,
    check_integer,
    check_text,
    prefix_hashes,
    prompt_array,
)
from mambacache.config import CacheConfig
from mambacache.plan import SequenceStep, StepPlan, Transfer, build_plan
from mambacache.report import CachedBlock, CacheEvent, CacheStats, Hit, Progress, RequestReport, Wait


class PrefixCache:
    """Which prefixes are cached where, and which blocks every row of every step reads and writes.

    Host integers only; for one thread. A request's way: `add`, then `admit` until it returns a hit, then for each step
    `next_tokens`, `allocate`, and for all rows together `plan`, the forward pass, `issued`, `accept`; at last `free`. A
    row belongs to one residency of its request, from admission to the next `preempt` or `free`, which may come at any
    moment. A later call for such a row gives its blocks back and notes its tokens, and changes nothing else.

    A call that is out of order or out of range raises, in one sentence, before anything changed: ValueError for
    arguments, RuntimeError for the order. If an exception breaks off a call half-way (Ctrl-C), the next one finds the
    requests and their tokens as they were, all of them preempted, and an empty cache. `files` are those that outlive
    the process, if there are any.
    """

    def __init__(self, config: CacheConfig, files: Files | None = None) -> None:
        self.config = config
        self._kept = Admission(config, files)

    # --- requests ---

    def add(
        self, request_id: str, token_ids: Sequence[int], *, salt: str = "",
        extra_keys: Iterable[tuple[int, object]] = (), checkpoint_at: Iterable[int] = (), read: bool = True,
        store: bool = True,
    ) -> None:  # fmt: skip
        """Hashes a prompt; takes no block.

        Args:
            token_ids: integers from 0 on, in a sequence, a numpy array or a tensor.
            salt: requests with different salts share nothing.
            extra_keys: (position, key) pairs, as for an image. A key enters the hash of its position's block. It is a
                str, bytes, an int, or a tuple of these.
            checkpoint_at: token positions, rounded down to blocks, whose state is worth a block. The eight nearest to
                the prompt's end may evict other states; those of one salt hold at most a quarter of all states.
            read: whether the request may use what is cached.
            store: whether what it computes is cached.

        Raises:
            ValueError: the prompt is empty, or too long for the KV pool; the id is taken; an argument is of no use.
        """
        size = self.config.block_size
        check_text("a request id", request_id)
        check_text("salt", salt)
        if request_id in self._admission.requests:
            raise ValueError(f"request id {request_id!r} is in use: choose another, or free that request first")
        tokens = prompt_array(request_id, token_ids, self.config.num_kv_blocks * size)
        keys, marks = block_keys(extra_keys, len(tokens), size), boundaries(checkpoint_at, size)
        chain = self._admission.chain(tokens, salt, keys)
        read, store = bool(read), bool(store)
        with self._admission as admission:
            request = admission.requests[request_id] = CachedRequest(
                request_id, size, tokens, len(tokens), salt, keys, marks, read, store, chain,
                next(admission.request_numbers),
            )  # fmt: skip
            admission.lookup.wait(request)

    def match(self, request_id: str, *, kv_tokens: int | None = None, max_tokens: int | None = None) -> Hit:
        """Looks up what a request would hit now; changes nothing.

        Args:
            kv_tokens: tokens that the host's own KV covers; required if the model has attention and the host keeps KV.
            max_tokens: the host's own bound on the hit.
        """
        request = self._known(request_id)
        check_bounds(self.config, kv_tokens, max_tokens)
        with self._admission as admission:  # the ledger notes first what it has not yet
            return admission.lookup.hit(request, admission.find(request, kv_tokens, max_tokens))

    def admit(self, request_id: str, *, kv_tokens: int | None = None, max_tokens: int | None = None) -> Hit | Wait:
        """Takes references to all that is hit, and a block for the running state, in one act. Arguments as of `match`.

        Raises:
            RuntimeError: the request runs.
        """
        request = self._known(request_id)
        check_bounds(self.config, kv_tokens, max_tokens)
        if request.residency is not None:
            raise RuntimeError(f"request {request_id!r} runs already: preempt it before it is admitted again")
        if request.issued or request.leaving is not None:
            return Wait("in flight")
        with self._admission as admission:
            return admission.admit(request, kv_tokens, max_tokens)

    def waits(self, request_id: str) -> bool:
        """Whether the prefix that the last `admit` said to wait for is still to come. Costs next to nothing."""
        return self._admission.still_waits(self._known(request_id)) is not None

    def withdraw(self, request_id: str) -> None:
        """Undoes an admission of which nothing ran: no preemption is counted, no report kept.

        Raises:
            RuntimeError: the request does not run, or a row of this residency was issued.
        """
        residency = self._running(request_id)
        if residency.ran:
            raise RuntimeError(f"request {request_id!r} has run since its admission: preempt it instead")
        with self._admission as admission:
            admission.end_residency(residency, finished=False)

    def fork(self, request_id: str, children: Mapping[str, int], *, max_running: int | None = None) -> list[str]:
        """More answers to a prompt that was just computed: they share its last state and its full KV blocks. Gives the
        ids that run now; the others, for which there is no room, are known, and wait for `admit`.

        Called after the `accept` that gave the request its first answer token, before it runs on.

        Args:
            children: for each further answer its request id and its own first token.
            max_running: how many of them may run now; None for all.

        Raises:
            ValueError: an id is in use, or a token is none.
            RuntimeError: the request has run on, or has no first token yet.
        """
        parent = self._known(request_id)
        check_fork(parent, children, max_running, self._admission.requests)
        with self._admission as admission:
            return admission.fork(parent, children, max_running)

    def preempt(self, request_id: str) -> None:
        """Takes a running request's blocks; it stays known with its tokens and waits for `admit` again."""
        residency = self._running(request_id)
        with self._admission as admission:
            admission.end_residency(residency, finished=False)
            admission.ledger.preempted()

    def free(self, request_id: str, *, finished: bool, wrong_from: int | None = None) -> None:
        """Forget a request; its committed blocks stay cached.

        Args:
            finished: False for an aborted request.
            wrong_from: where its logits were NaN, the position of the last token with sound logits before it. The
                blocks that the request's rows wrote behind this position are dropped.

        Raises:
            ValueError: the request is not known, or `wrong_from` is no position in it.
        """
        request = self._known(request_id)
        finished = bool(finished)
        if wrong_from is not None:
            check_integer("wrong_from", wrong_from, 0, len(request.tokens))
        with self._admission as admission:
            admission.forget(request, finished, wrong_from)

    def suspects(self, request_id: str) -> list[CachedBlock]:
        """Return the blocks that a request resumed from and that none of its own finite logits have proved, the deepest
        first. Call it when the request's logits are NaN: test these blocks on the device and `invalidate` the bad ones.
        """
        request = self._known(request_id)
        return self._admission.suspects(request)

    def invalidate(self, hashes: Iterable[bytes]) -> None:
        """Forget the states and the KV pages of these prefix hashes, on the device and below it.

        Raises:
            ValueError: a hash is not of type bytes.
        """
        gone = prefix_hashes(hashes)
        with self._admission as admission:
            admission.drop(gone)

    def abandon(self) -> None:
        """A host's step broke off: rows that were not issued never will be, and every running request is preempted."""
        with self._admission as admission:
            admission.abandon()

    # --- steps ---

    def progress(self, request_id: str) -> Progress:
        """How far a running request came."""
        residency = self._running(request_id)
        request = residency.request
        return Progress(
            residency.computed, residency.prefill_end, request.in_flight, max(request.sound, request.resumed)
        )

    def next_tokens(self, request_id: str, budget: int) -> int:
        """How many tokens to run now, 1 to `budget`: all that is left of the prompt, else up to the last boundary in
        reach, else the whole budget; 1 for a decoding request."""
        residency = self._running(request_id)
        check_integer("budget", budget, 1)
        left, budget = residency.prefill_end - residency.computed, int(budget)
        if left <= 1 or left <= budget:
            return max(left, 1)
        size = self.config.block_size
        aligned = (residency.computed + budget) // size * size - residency.computed
        return aligned if aligned > 0 else budget

    def allocate(
        self, request_id: str, num_tokens: int, *, drafts: Sequence[int] = (), parents: Sequence[int] = (),
        decode: bool = False,
    ) -> SequenceStep | None:  # fmt: skip
        """The row that runs the next `num_tokens` tokens and then `drafts`, with a block if it stores a state; if there
        is no room it is None, and nothing has changed.

        Before `accept` is told which drafts of a row agreed, one more may be allocated: it is `late` by some of them.

        Args:
            num_tokens: 1 to what is left of the tokens known at admission; 1 after them.
            drafts: guesses of a decoding request's next tokens, up to a multiple of 16; `PLACEHOLDER`: one unknown.
            parents: where they form a tree, in preorder: the number of the draft that each one follows, counted from 1,
                or 0 for the known token. Before the next row runs, what is `kept` of it must be moved.
            decode: a single token of the prompt runs in the decode kernels (its state is then near).
        """
        residency, decode = self._running(request_id), bool(decode)
        guesses = check_next_row(residency, num_tokens, drafts, parents, decode, self.config.max_draft_tokens)
        admission = self._admission
        admission.torn = True  # as `with books` does, which takes as long as a third of the rest
        row = admission.allocate(residency, int(num_tokens), guesses, decode)
        admission.torn = False
        return row.step if row is not None else None

    def drop(self, step: SequenceStep) -> None:
        """An allocated row is not run: its blocks go back, the request stays admitted."""
        for row in self._admission.rows.find([step], ending=True):
            if row.issue:
                raise RuntimeError(f"the row of request {step.request_id!r} was issued: accept or cancel it")
            with self._admission as admission:
                admission.drop_row(row)

    def plan_rows(self, steps: Sequence[SequenceStep]) -> tuple[SequenceStep, ...]:
        """The rows of a step with their checkpoints, for hosts whose workers order the batch (`plan.layout`)."""
        rows = self._admission.rows.to_plan(steps)
        with self._admission as admission:
            admission.states.checkpoints.plan(rows)
            return tuple([
                row.step._replace(prompt_logits=True) if step.prompt_logits else row.step
                for row, step in zip(rows, steps, strict=True)
            ])  # fmt: skip

    def plan(self, steps: Sequence[SequenceStep]) -> StepPlan:
        """The step of all these rows: adds checkpoints inside them and lays out the arrays."""
        planned = sorted(self.plan_rows(steps), key=lambda step: step.prefill)  # stable: as given within each kind
        residencies = [self._admission.rows[step.row].residency for step in planned]
        tokens = [residency.request.tokens for residency in residencies]
        return build_plan(planned, tokens, self._admission.pages.tables(residencies), self.config.block_size)

    def issued(self, steps: Sequence[SequenceStep]) -> None:
        """The forward pass is on the stream: what consists of known tokens becomes readable for later steps."""
        rows = self._admission.rows.to_issue(steps)
        with self._admission as admission:
            for row in rows:
                admission.issued(row)

    def accept(
        self, steps: Sequence[SequenceStep], token_ids: Mapping[str, Sequence[int]], *, not_finite: Iterable[str] = ()
    ) -> None:
        """The step's tokens have been read. Rows of one request are accepted in the order in which they were issued.

        Args:
            token_ids: for each request that sampled, the tokens that remain after stops, a stop token included. A
                request that stopped runs no further step.
            not_finite: ids of the requests of this step with NaN or infinite logits, freed requests included. The
                blocks that their rows wrote since their last finite logits are dropped, and no more are stored.
        """
        bad = frozenset(not_finite)
        taken = self._admission.rows.to_accept(steps, token_ids)
        with self._admission as admission:
            admission.accept(steps, taken, bad)

    def decoded(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Steps that were read, and only added these tokens to a request's log: as if rows had been allocated, planned,
        issued and accepted. Told before its next `allocate`, `preempt` or `free`; for hosts that have the KV."""
        residency = self._running(request_id)
        tokens = check_decoded(residency, token_ids, self.config.num_kv_blocks)
        with self._admission as admission:
            admission.decoded(residency, tokens)

    def under_way(self, step: SequenceStep) -> bool:
        """Return whether a row was allocated, and neither accepted, cancelled nor dropped. A row that was issued stays
        under way when its request is freed."""
        rows = self._admission.rows
        row = rows.get(step.row)
        return row.residency.number == step.residency if row is not None else step.row in rows.freed

    def is_live(self, step: SequenceStep) -> bool:
        """Whether the tokens of a row will be noted: not once it has ended, or a step that it goes on from failed."""
        row = self._admission.rows.get(step.row)
        return row is not None and row.residency.number == step.residency and not row.residency.void

    def cancel(self, steps: Sequence[SequenceStep]) -> None:
        """The step failed, before it was issued or on the device: its requests are preempted, and nothing of it stays.

        After `issued`, all that was committed since is dropped, and the requests that resumed from it are preempted
        too. Pass every row of the step, those of freed requests too.
        """
        rows = self._admission.rows.find(steps, ending=True)
        with self._admission as admission:
            admission.cancel(steps, rows)

    # --- the tiers in host memory and in files ---

    def transfers(self, *, flush: bool = False) -> tuple[Transfer, ...]:
        """What is to be copied between device, host and files: all transfers under way, the oldest first. To be called
        between steps, after `admit`: launch those with new numbers, behind what the device was told before. Whoever
        never calls it has no such tier. With `flush` all that no file has goes there, bit by bit."""
        flush = bool(flush)
        with self._admission as admission:
            return admission.tier.transfers(flush)

    def transferred(self, transfer: Transfer, *, failed: bool = False) -> None:
        """A transfer is done; or it failed, and what it wrote is never read. Either way it has ended on the device.

        Raises:
            RuntimeError: it is not under way.
        """
        check_under_way(transfer, self._admission.tier.moves)
        failed = bool(failed)
        with self._admission as admission:
            admission.tier.transferred(transfer.number, failed)

    # --- the cache as a whole ---

    @property
    def stats(self) -> CacheStats:
        """A snapshot: totals, and how many blocks are in use at this moment."""
        return totals(self._admission)

    @property
    def request_ids(self) -> list[str]:
        """The requests that are known."""
        return list(self._admission.requests)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id was added, and not freed."""
        return request_id in self._admission.requests

    def tokens(self, request_id: str) -> Sequence[int]:
        """The known tokens of a request: its prompt, and the answer as far as it was accepted."""
        return self._known(request_id).tokens

    def runs(self, request_id: str) -> bool:
        """Whether a request is admitted."""
        return self._known(request_id).residency is not None

    def report(self, request_id: str) -> RequestReport | None:
        """What the cache did for the request at the admission after which it first ran; None before it ran."""
        return self._known(request_id).report

    def kv_evicted(self, hashes: Iterable[bytes]) -> None:
        """The host's KV of these blocks (hashes as in `CacheEvent`) is gone: states there are evicted first.

        Raises:
            ValueError: a hash is not of type bytes.
        """
        gone = prefix_hashes(hashes)
        with self._admission as admission:
            for block in filter(None, map(admission.pool.lookup, gone)):
                admission.pool.evict_first(block)

    def kv_stored(self, hashes: Iterable[bytes]) -> None:
        """The host has the KV of these blocks again: takes back `kv_evicted`.

        Raises:
            ValueError: a hash is not of type bytes.
        """
        back = prefix_hashes(hashes)
        with self._admission as admission:
            for block_hash in back:
                admission.pool.restore(block_hash)

    def reset(self) -> None:
        """Drops all that is cached, as after a change of weights; running requests finish, and commit nothing more."""
        with self._admission as admission:
            admission.reset()

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, oldest first; the latest 65,536 are kept, and numbers tell of a gap."""
        return self._admission.ledger.take_events()

    def check(self) -> None:
        """Raises AssertionError unless the books balance: every block is free, held or evictable, and counted once."""
        check(self._admission)

    # --- what stands behind it ---

    @property
    def _admission(self) -> Admission:
        """The books in order: a change of them that was broken off is mended before they are looked at."""
        if self._kept.torn:
            mend(self._kept)
        return self._kept

    def _known(self, request_id: str) -> CachedRequest:
        request = self._admission.requests.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id!r} is not known: add it first")
        return request

    def _running(self, request_id: str) -> Residency:
        request = self._admission.requests.get(request_id)
        if request is None or request.residency is None:
            self._known(request_id)
            raise RuntimeError(f"request {request_id!r} does not run: admit it first")
        return request.residency
