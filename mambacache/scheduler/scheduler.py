"""Continuous batching with chunked prefill, whose chunks end on block boundaries where they can."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Sequence

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.plan import SequenceStep, StepPlan
from mambacache.scheduler.request import FinishReason, Request

logger = logging.getLogger(__name__)

DraftSource = Callable[[Request, int], Sequence[int]]
"""Proposes at most so many tokens that may follow a request's known ones. If it raises, there are none."""


class Scheduler:
    """Decides which rows run in a step: decode first, then prefill in order of arrival, under a budget of tokens.

    Alignment decides what is cached, never whether a request runs: any budget of one token or more makes progress.
    `schedule` may be called again before the tokens of the step before are known (`update`).

    Args:
        cache: chooses blocks and says what is cached.
        max_num_batched_tokens: tokens of a step, at most.
        max_num_seqs: requests that run at a time, at most.
        long_prefill_token_threshold: tokens that one prompt may take of a step; 0 for no cap.
        draft: where draft tokens come from; None for none.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        long_prefill_token_threshold: int = 0,
        draft: DraftSource | None = None,
    ) -> None:
        self.cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._long_prefill = long_prefill_token_threshold
        self._draft = draft
        self._arrivals = 0
        self.requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # both in order of arrival
        self._running: list[Request] = []
        self._suspects: set[str] = set()  # requests of a failed step that have not been issued since
        self._steps: dict[str, SequenceStep] = {}  # of the step being planned
        self._budget = 0

    # --- requests ---

    def add(self, request: Request) -> None:
        """Puts a request in line."""
        params = request.params
        self.cache.add(
            request.request_id,
            request.prompt,
            salt=params.salt,
            checkpoint_at=params.checkpoint_at,
            read=params.read_cache and params.prompt_logprobs is None,
            store=params.store_cache,
        )
        self._enlist(request)
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; what it committed stays cached. An unknown id is ignored: it may have ended."""
        request = self.requests.get(request_id)
        if request is not None:
            request.finish_reason = FinishReason.ABORT
            self._finish(request)

    def _enlist(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals
        self.requests[request.request_id] = request

    # --- a step ---

    def schedule(self) -> StepPlan | None:
        """The next step, or None if no request can run (none is there, or all wait for tokens that are not read)."""
        self._steps = {}
        self._budget = self._max_num_batched_tokens
        if self._suspects and self._schedule_alone():
            return self.cache.plan(list(self._steps.values()))
        running = len(self._running)
        for prefilling in (False, True):
            for request in list(self._running):
                if self._budget > 0 and request.running and request.prefilling == prefilling:
                    self._schedule_row(request)
        if len(self._running) == running and not self._suspects:  # else something was preempted for lack of blocks
            self._admit()
        return self.cache.plan(list(self._steps.values())) if self._steps else None

    def _schedule_alone(self) -> bool:
        """After a failed step its requests run one to a step, so that only the one that fails alone ends."""
        suspect = next(r for r in (*self._running, *self._waiting) if r.request_id in self._suspects)
        if not suspect.running and (len(self._running) >= self._max_num_seqs or not self._try_admit(suspect)):
            return False
        return self._schedule_row(suspect)

    def _admit(self) -> None:
        for request in list(self._waiting):
            if self._budget <= 0 or len(self._running) >= self._max_num_seqs:
                return
            if self._try_admit(request):
                if not self._schedule_row(request):
                    return
            elif self.cache.waits_for(request.request_id) is None:
                return  # it does not fit, and holds back all behind it

    def _try_admit(self, request: Request) -> bool:
        hit = self.cache.admit(request.request_id)
        if hit is None:
            return False
        request.report = request.report or self.cache.report(request.request_id)
        request.computed, request.prefill_end = hit.num_tokens, request.num_tokens
        self._waiting.remove(request)
        self._run(request)
        return True

    def _run(self, request: Request) -> None:
        request.running = True
        insort(self._running, request, key=lambda r: r.arrival)

    def _schedule_row(self, request: Request) -> bool:
        """Adds a row for a running request, if it has something to run and there is room."""
        drafts: tuple[int, ...] = ()
        if request.prefilling:
            num_tokens = self._prefill_tokens(request)
        else:
            num_tokens = int(self._may_decode(request))
            drafts = self._propose(request) if num_tokens and self._draft is not None else ()
        if not num_tokens:
            return False
        step = self.cache.allocate(request.request_id, num_tokens, drafts=drafts)
        while step is None:
            if drafts:
                drafts = drafts[:-1]
            elif not self._preempt_younger(request):
                return False
            step = self.cache.allocate(request.request_id, num_tokens, drafts=drafts)
        step.prompt_logits = step.prefill and request.params.prompt_logprobs is not None
        request.computed += num_tokens
        request.in_flight += step.samples
        self._budget -= step.num_tokens
        self._steps[request.request_id] = step
        return True

    def _may_decode(self, request: Request) -> bool:
        if request.in_flight and (request.siblings or self._draft is not None):
            return False  # what it goes on from is known when its tokens are: a fork, or the last accepted draft
        return request.in_flight + len(request.output) < request.params.max_tokens

    def _prefill_tokens(self, request: Request) -> int:
        budget = min(self._budget, self._long_prefill or self._budget)
        num_tokens = self.cache.chunk(request.request_id, budget)
        end = request.computed + num_tokens
        useful = end == request.prefill_end or end % self.cache.config.block_size == 0
        first = not any(step.prefill for step in self._steps.values())
        return num_tokens if useful or first else 0

    def _propose(self, request: Request) -> tuple[int, ...]:
        assert self._draft is not None
        left = request.params.max_tokens - len(request.output) - 1
        limit = min(self.cache.config.max_draft_tokens, self._budget - 1, left)
        if limit <= 0:
            return ()
        try:
            return tuple(self._draft(request, limit)[:limit])
        except Exception:  # others have taken blocks for this step, and a draft is only a guess
            logger.exception("the draft source failed: %s goes on without drafts", request.request_id)
            return ()

    def _preempt_younger(self, request: Request) -> bool:
        """Preempts the youngest request that came after this one and has no row in this step."""
        for victim in reversed(self._running):
            if victim.arrival <= request.arrival:
                return False
            if victim.request_id not in self._steps:
                self.cache.preempt(victim.request_id)
                self._queue_again(victim)
                return True
        return False

    def _queue_again(self, request: Request) -> None:
        request.running, request.computed, request.prefill_end = False, 0, 0
        self._running.remove(request)
        insort(self._waiting, request, key=lambda r: r.arrival)

    # --- after it ---

    def issued(self, plan: StepPlan) -> None:
        """The forward pass is on the stream."""
        self.cache.issued(plan)
        self._suspects.difference_update(step.request_id for step in plan.steps)

    def failed(self, plan: StepPlan, error: BaseException) -> list[Request]:
        """Issuing the step raised: nothing of it counts. Gives the request that failed alone, if it did."""
        self.cache.cancel(plan)
        requests = [self.requests[step.request_id] for step in plan.steps if step.request_id in self.requests]
        for step in plan.steps:
            if step.request_id in self.requests:
                self.requests[step.request_id].in_flight -= step.samples
        for request in requests:
            self._queue_again(request)
        if len(plan.steps) > 1:
            self._suspects.update(request.request_id for request in requests)
            return []
        for request in requests:
            request.finish_reason, request.error = FinishReason.ERROR, str(error)
            self._finish(request)
        return requests

    def update(self, plan: StepPlan, sampled: Sequence[Sequence[int]]) -> list[Request]:
        """The step's tokens were read.

        Args:
            sampled: for each row of `plan.steps` the sampled tokens: none if it does not sample; one after each of its
                tokens for a decode row; one for each answer wanted where a prompt ends.

        Returns:
            The requests that got tokens, finished ones among them.
        """
        accepted: dict[str, list[int]] = {}
        touched = []
        for step, tokens in zip(plan.steps, sampled, strict=True):
            request = self.requests.get(step.request_id)
            if request is None or not step.samples:
                continue
            request.in_flight -= 1
            taken = request.take(_agreed(step.drafts, tokens) if not step.prefill else tokens[:1])
            if not step.prefill:
                request.computed += len(taken) - 1
            accepted[step.request_id] = taken
            touched.append(request)
        self.cache.accept(plan, accepted)
        for step, tokens in zip(plan.steps, sampled, strict=True):
            request = self.requests.get(step.request_id)
            if request is not None and step.samples and request.siblings:
                touched += self._fork(request, tokens[1:])
        for request in touched:
            if request.finish_reason is not None:
                self._finish(request)
        return touched

    def _fork(self, request: Request, tokens: Sequence[int]) -> list[Request]:
        """The prompt is computed: its further answers begin, each with its own first token."""
        siblings, request.siblings = request.siblings, []
        children = dict(zip((s.request_id for s in siblings), tokens, strict=True))
        room = self._max_num_seqs - len(self._running)
        running = self.cache.fork(request.request_id, children, max_running=room)
        for sibling, token in zip(siblings, tokens, strict=True):
            self._enlist(sibling)
            sibling.report = request.report
            sibling.take([token])
            if sibling.request_id in running:
                sibling.computed = sibling.prefill_end = len(sibling.prompt)
                self._run(sibling)
            else:
                self._waiting.append(sibling)
        return siblings

    def _finish(self, request: Request) -> None:
        self.requests.pop(request.request_id)
        self.cache.free(request.request_id, finished=request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH))
        (self._running if request.running else self._waiting).remove(request)
        self._suspects.discard(request.request_id)
        for sibling in request.siblings:  # never begun: the prompt was not computed
            sibling.finish_reason, sibling.error = request.finish_reason, request.error

    @property
    def idle(self) -> bool:
        """Whether no request is there."""
        return not self.requests


def _agreed(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The sampled tokens whose inputs, the drafts before them, were sampled too."""
    agreed = [sampled[0]]
    for draft, token in zip(drafts, sampled[1:], strict=True):
        if draft != agreed[-1]:
            break
        agreed.append(token)
    return agreed
