"""Define the public face of the cache."""

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
    page_ends,
    page_numbers,
    prefix_hashes,
    prompt_array,
)
from mambacache.config import CacheConfig
from mambacache.plan import SequenceStep, StepPlan, Transfer, build_plan
from mambacache.report import CachedBlock, CacheEvent, CacheStats, Hit, Progress, RequestReport, Wait


class PrefixCache:
    """Tracks cached prefixes, and chooses the blocks that every row reads and writes.

    It holds host integers only, for one thread. A request takes `add`, then `admit` until it returns a hit, and `free`
    at the end. A step takes `next_tokens` and `allocate` for each row, then for all rows `plan`, the forward pass,
    `issued` and `accept`.

    `preempt` and `free` may come at any moment: later calls for rows before them only give blocks back and note tokens.

    A wrong argument raises ValueError, and a call out of order RuntimeError, before anything has changed. If an
    exception such as Ctrl-C breaks off a call, the next call finds an empty cache and all requests preempted, with
    their tokens.
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
        """Hash a prompt and register its request, without any block.

        Args:
            token_ids: integers from 0 on, as a sequence, array or tensor.
            salt: requests with different salts share nothing.
            extra_keys: (position, key) pairs, as for an image. A key (str, bytes, int, or a tuple of these) enters the
                hash of its block.
            checkpoint_at: token positions, rounded down to blocks, to store states at. The eight nearest to the
                prompt's end may evict other states, up to a quarter of all states for a salt.
            read: use cached blocks.
            store: cache its blocks.
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
        """Return the hit that a request would get now.

        Args:
            kv_tokens: tokens in the host's KV; required if the host keeps it.
            max_tokens: bound on the hit.
        """
        request = self._known(request_id)
        check_bounds(self.config, kv_tokens, max_tokens)
        with self._admission as admission:  # updates the ledger
            return admission.lookup.hit(request, admission.find(request, kv_tokens, max_tokens))

    def admit(self, request_id: str, *, kv_tokens: int | None = None, max_tokens: int | None = None) -> Hit | Wait:
        """Take all hit blocks and a block for the running state; arguments as in `match`."""
        request = self._known(request_id)
        check_bounds(self.config, kv_tokens, max_tokens)
        if request.residency is not None:
            raise RuntimeError(f"request {request_id!r} runs already: preempt it before it is admitted again")
        if request.issued or request.leaving is not None:
            return Wait("in flight")
        with self._admission as admission:
            return admission.admit(request, kv_tokens, max_tokens)

    def waits(self, request_id: str) -> bool:
        """Return whether the prefix that `admit` waits for is still to come; cheap."""
        return self._admission.still_waits(self._known(request_id)) is not None

    def withdraw(self, request_id: str) -> None:
        """Undo an admission before its first row is issued."""
        residency = self._running(request_id)
        if residency.ran:
            raise RuntimeError(f"request {request_id!r} has run since its admission: preempt it instead")
        with self._admission as admission:
            admission.end_residency(residency, finished=False)

    def fork(self, request_id: str, children: Mapping[str, int], *, max_running: int | None = None) -> list[str]:
        """Start more answers to a prompt, which share its last state and full KV blocks; return the ids that run now.

        Call it after the `accept` of the first answer token, before the request runs on. Other answers wait for
        `admit`.

        Args:
            children: request id and first token of each answer.
            max_running: most children to run now.
        """
        parent = self._known(request_id)
        check_fork(parent, children, max_running, self._admission.requests)
        with self._admission as admission:
            return admission.fork(parent, children, max_running)

    def preempt(self, request_id: str) -> None:
        """Take the blocks of a running request, which keeps its tokens and waits for `admit`."""
        residency = self._running(request_id)
        with self._admission as admission:
            admission.end_residency(residency, finished=False)
            admission.ledger.preempted()

    def free(self, request_id: str, *, finished: bool, wrong_from: int | None = None) -> None:
        """Forget a request; its committed blocks stay cached.

        Args:
            finished: False for an aborted request.
            wrong_from: position of the last token with sound logits, if later logits were NaN; drops the blocks that
                the request wrote behind it.
        """
        request = self._known(request_id)
        finished = bool(finished)
        if wrong_from is not None:
            check_integer("wrong_from", wrong_from, 0, len(request.tokens))
        with self._admission as admission:
            admission.forget(request, finished, wrong_from)

    def suspects(self, request_id: str) -> list[CachedBlock]:
        """Return the blocks of a hit that no finite logits have proved, deepest first.

        After NaN logits, test them on the device and `invalidate` the bad blocks.
        """
        request = self._known(request_id)
        return self._admission.suspects(request)

    def invalidate(self, hashes: Iterable[bytes]) -> None:
        """Forget the blocks of these prefix hashes, on device, host and in files."""
        gone = prefix_hashes(hashes)
        with self._admission as admission:
            admission.drop(gone)

    def abandon(self) -> None:
        """Give up a broken step: forget rows that were not issued, and preempt all requests."""
        with self._admission as admission:
            admission.abandon()

    # --- steps ---

    def progress(self, request_id: str) -> Progress:
        """Return a running request's positions."""
        residency = self._running(request_id)
        request = residency.request
        return Progress(
            residency.computed, residency.prefill_end, request.in_flight, max(request.sound, request.resumed)
        )

    def next_tokens(self, request_id: str, budget: int) -> int:
        """Return the number of tokens to run now; 1 in decode.

        Run the rest of the prompt if `budget` allows, else up to the last boundary in reach, else `budget` tokens.
        """
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
        """Allocate a row for the next `num_tokens` tokens and `drafts`; None, with nothing changed, without room.

        One more row may be allocated before `accept` resolves a row's drafts.

        Args:
            num_tokens: 1 to the rest of the tokens known at admission; 1 after them.
            drafts: guesses of next tokens in decode, `PLACEHOLDER` for unknown; cut at a multiple of 16.
            parents: number of each draft's parent, for a tree in preorder: from 1, or 0 for the known token. Move the
                `kept` tokens before the next row runs.
            decode: run a single prompt token in the decode kernels, which makes its state inexact.
        """
        residency, decode = self._running(request_id), bool(decode)
        guesses = check_next_row(residency, num_tokens, drafts, parents, decode, self.config.max_draft_tokens)
        admission = self._admission
        admission.torn = True  # hot path: `with admission` inlined
        row = admission.allocate(residency, int(num_tokens), guesses, decode)
        admission.torn = False
        return row.step if row is not None else None

    def drop(self, step: SequenceStep) -> None:
        """Take back an allocated row; the request stays admitted."""
        for row in self._admission.rows.find([step], ending=True):
            if row.issue:
                raise RuntimeError(f"the row of request {step.request_id!r} was issued: accept or cancel it")
            with self._admission as admission:
                admission.drop_row(row)

    def plan_rows(self, steps: Sequence[SequenceStep]) -> tuple[SequenceStep, ...]:
        """Add checkpoints to rows, for hosts that lay out the batch themselves (`plan.layout`)."""
        rows = self._admission.rows.to_plan(steps)
        with self._admission as admission:
            admission.states.checkpoints.plan(rows)
            return tuple([
                row.step._replace(prompt_logits=True) if step.prompt_logits else row.step
                for row, step in zip(rows, steps, strict=True)
            ])  # fmt: skip

    def plan(self, steps: Sequence[SequenceStep]) -> StepPlan:
        """Add checkpoints to a step's rows and lay out its arrays."""
        planned = sorted(self.plan_rows(steps), key=lambda step: step.prefill)  # stable: in the given order
        residencies = [self._admission.rows[step.row].residency for step in planned]
        tokens = [residency.request.tokens for residency in residencies]
        return build_plan(planned, tokens, self._admission.pages.tables(residencies), self.config.block_size)

    def issued(self, steps: Sequence[SequenceStep]) -> None:
        """Note that the pass is on the stream: later steps may read its blocks of known tokens."""
        rows = self._admission.rows.to_issue(steps)
        with self._admission as admission:
            for row in rows:
                admission.issued(row)

    def accept(
        self, steps: Sequence[SequenceStep], token_ids: Mapping[str, Sequence[int]], *, not_finite: Iterable[str] = ()
    ) -> None:
        """Note the tokens of a step. Accept rows of one request in the order of issue.

        Args:
            token_ids: tokens of each request that sampled, through a stop. A stopped request runs no further step.
            not_finite: ids in the step, also of freed requests, with NaN or infinite logits; drops the blocks that they
                wrote since their last finite logits, and stores no more.
        """
        bad = frozenset(not_finite)
        taken = self._admission.rows.to_accept(steps, token_ids)
        with self._admission as admission:
            admission.accept(steps, taken, bad)

    def decoded(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Note steps that only added these tokens to a token log, in place of `allocate` to `accept`.

        Call it before the next `allocate`, `preempt` or `free`, in a cache without KV pages.
        """
        residency = self._running(request_id)
        tokens = check_decoded(residency, token_ids, self.config.num_kv_blocks)
        with self._admission as admission:
            admission.decoded(residency, tokens)

    def under_way(self, step: SequenceStep) -> bool:
        """Tell whether a row is allocated and not yet accepted, cancelled or dropped, even of a freed request."""
        rows = self._admission.rows
        row = rows.get(step.row)
        return row.residency.number == step.residency if row is not None else step.row in rows.freed

    def is_live(self, step: SequenceStep) -> bool:
        """Tell whether a row's tokens will be noted: it is under way, and no step before it failed."""
        row = self._admission.rows.get(step.row)
        return row is not None and row.residency.number == step.residency and not row.residency.void

    def cancel(self, steps: Sequence[SequenceStep]) -> None:
        """Cancel a step that failed, before `issued` or on the device, and preempt its requests.

        After `issued`, drop all blocks committed since, and preempt requests that resumed from them. Pass all rows of
        the step, also of freed requests.
        """
        rows = self._admission.rows.find(steps, ending=True)
        with self._admission as admission:
            admission.cancel(steps, rows)

    # --- tiers in host memory and files ---

    def transfers(self, *, flush: bool = False) -> tuple[Transfer, ...]:
        """Return all transfers under way between device, host and files, oldest first.

        Call it between steps, after `admit`, and launch new transfers behind all earlier work of the device. Calls with
        `flush` bring every block to files.
        """
        flush = bool(flush)
        with self._admission as admission:
            return admission.tier.transfers(flush)

    def transferred(self, transfer: Transfer, *, failed: bool = False) -> None:
        """End a transfer that is over on the device; if it `failed`, its copies are never read."""
        check_under_way(transfer, self._admission.tier.moves)
        failed = bool(failed)
        with self._admission as admission:
            admission.tier.transferred(transfer.number, failed)

    # --- the cache as a whole ---

    @property
    def stats(self) -> CacheStats:
        """Return totals, and the numbers of blocks."""
        return totals(self._admission)

    @property
    def request_ids(self) -> list[str]:
        return list(self._admission.requests)

    def knows(self, request_id: str) -> bool:
        """Tell whether a request is known."""
        return request_id in self._admission.requests

    def tokens(self, request_id: str) -> Sequence[int]:
        """Return a request's prompt and accepted answer."""
        return self._known(request_id).tokens

    def runs(self, request_id: str) -> bool:
        """Tell whether a request is admitted."""
        return self._known(request_id).residency is not None

    def report(self, request_id: str) -> RequestReport | None:
        """Return the report of the first admission that ran."""
        return self._known(request_id).report

    def kv_evicted(self, hashes: Iterable[bytes]) -> None:
        """Evict first the states at these prefix hashes, also in host memory: the host engine's KV is gone."""
        gone = prefix_hashes(hashes)
        with self._admission as admission:
            for pool in (admission.pool, admission.tier.states):
                for block in filter(None, map(pool.lookup, gone)):
                    pool.evict_first(block)

    def kv_stored(self, hashes: Iterable[bytes]) -> None:
        """Take back `kv_evicted`: the host has the KV again."""
        back = prefix_hashes(hashes)
        with self._admission as admission:
            for block_hash in back:
                admission.pool.restore(block_hash)
                admission.tier.states.restore(block_hash)

    def kv_released(self, request_id: str, pages: Mapping[int, int]) -> None:
        """Note which KV pages of the host a request filled and uses no more. Others may use them still.

        Give pages with new content to `kv_dropped` before.

        Args:
            pages: number of the request's tokens up to the end of each page, from the first page on.
        """
        request, ends, size = self._known(request_id), page_ends(pages), self.config.block_size
        if any(map(self._admission.kv_order.has, ends)):
            raise ValueError("a page is in the order already: release it before `kv_unused`")
        depths = {page: -(-end // size) for page, end in ends.items()}
        with self._admission as admission:
            admission.kv_order.release({page: request.chain[d] for page, d in depths.items() if d < len(request.chain)})

    def kv_unused(self, pages: Iterable[int]) -> None:
        """Order unused pages of the host's KV for eviction, a request's last page first."""
        unused = page_numbers(pages)
        if len({*unused}) < len(unused) or any(map(self._admission.kv_order.has, unused)):
            raise ValueError("a page is in the order already: give it once after each use")
        with self._admission as admission:
            admission.kv_order.add(unused)

    def kv_used(self, page: int) -> None:
        """Take back `kv_unused`: a request uses the page again."""
        check_integer("page", page, 0)
        if not self._admission.kv_order.has(page):
            raise ValueError(f"page {page} is not in the order: give a page of `kv_unused`")
        with self._admission as admission:
            admission.kv_order.remove(page)

    def kv_dropped(self, pages: Iterable[int]) -> None:
        """Forget pages with lost content."""
        dropped = page_numbers(pages)
        with self._admission as admission:
            admission.kv_order.drop(dropped)

    def evict_kv(self, count: int) -> list[int]:
        """Remove the next pages, at most `count`, from the order. The host evicts them."""
        check_integer("count", count, 0)
        with self._admission as admission:
            return admission.kv_order.evict(count)

    def reset(self) -> None:
        """Drop all cached blocks, as after a change of weights. Running requests commit nothing more."""
        with self._admission as admission:
            admission.reset()

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call, oldest first, at most 65,536."""
        return self._admission.ledger.take_events()

    def check(self) -> None:
        """Raise AssertionError unless each block is free, held or evictable."""
        check(self._admission)

    # --- internals ---

    @property
    def _admission(self) -> Admission:
        """Return the records, rebuilt after a broken change."""
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
