"""Batch requests continuously, with chunked prefill."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.plan import FOLD, NO_GUESS, NOT_FINITE, Guess, SequenceStep, StepPlan, Transfer
from mambacache.report import Progress, Wait
from mambacache.scheduler.drafts import DeviceDrafts, Drafts, DraftSource, agreed, drafts_room
from mambacache.scheduler.request import FinishReason, Request
from mambacache.scheduler.waiting_line import WaitingLine

logger = logging.getLogger(__name__)


class Scheduler:
    """Chooses the rows of a step: decode rows, then prefill in order of arrival, within a token budget.

    `schedule` may be called again before `update`. After an exception the next call puts every request back in line.
    Arguments as in `EngineConfig`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        long_prefill_token_threshold: int = 0,
        draft: DraftSource | DeviceDrafts | None = None,
        vocab_size: int = 1 << 31,
    ) -> None:
        for name, value in (("max_num_batched_tokens", max_num_batched_tokens), ("max_num_seqs", max_num_seqs)):
            if value < 1:
                raise ValueError(f"{name} is {value}: set it to 1 or more")
        if long_prefill_token_threshold < 0:
            raise ValueError(f"long_prefill_token_threshold is {long_prefill_token_threshold}: set it to 0 or more")
        self.cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._long_prefill = long_prefill_token_threshold
        self._drafts = draft if draft is None or isinstance(draft, DeviceDrafts) else Drafts(draft, vocab_size)
        self._arrivals = 0
        self._admissions = 0
        self.requests: dict[str, Request] = {}  # unfinished
        self._waiting = WaitingLine()
        self._running: dict[Request, None] = {}
        self._suspects: set[Request] = set()  # of failed steps
        self._rows: dict[int, Request] = {}  # rows in flight
        self._steps: dict[Request, SequenceStep] = {}
        self._victims: list[Request] = []  # preemptible, youngest last
        self._budget = 0
        self._touched: dict[Request, None] = {}
        self._planned: StepPlan | None = None  # neither issued nor failed
        self._failing: list[SequenceStep] = []
        self._torn = False  # a change was interrupted

    # --- requests ---

    def add(self, request: Request) -> None:
        """Put a request and its siblings in line, or raise ValueError."""
        self._mend()
        params, config = request.params, self.cache.config
        answers = [request, *request.siblings]
        for request_id, count in Counter(each.request_id for each in answers).items():
            if request_id in self.requests or count > 1:
                raise ValueError(f"request id {request_id!r} is in use: choose another")
        longest, pool = len(request.prompt) + params.max_tokens - 1, config.num_kv_blocks * config.block_size
        if 0 < pool < longest:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens and max_tokens is {params.max_tokens}, and the KV pool "
                f"holds {pool}: shorten it, or raise num_kv_blocks"
            )
        with self._change(refusal=ValueError):
            self._add_to_cache(request)
            for each in answers:
                self._arrivals += 1
                each.arrival = self._arrivals
            self.requests.update({each.request_id: each for each in answers})
            self._waiting.push(request)

    def _add_to_cache(self, request: Request) -> None:
        params = request.params
        self.cache.add(
            request.request_id,
            request.prompt,
            salt=params.salt,
            checkpoint_at=params.checkpoint_at,
            read=params.read_cache and params.prompt_logprobs is None,
            store=params.store_cache,
        )

    def abort(self, request_id: str) -> None:
        """End a request, if known."""
        request = self.requests.get(request_id)
        if request is not None:
            self._mend()
            with self._change():
                request.finish_reason = FinishReason.ABORT
                self._end([request])
                self._touched.pop(request, None)  # known to the caller

    @property
    def idle(self) -> bool:
        """Tell whether no work is left."""
        return not (self.requests or self._torn or self._failing or self._planned is not None)

    # --- steps ---

    def schedule(self) -> StepPlan | None:
        """Return the next step; None if no request can run."""
        self._torn = self._torn or self._planned is not None  # never issued
        self._mend()
        if self._awaits_tokens():
            return None
        with self._change():
            self._victims = sorted(self._running, key=attrgetter("arrival"))
            self._steps, self._budget = {}, self._max_num_batched_tokens
            if not (self._suspects and self._schedule_alone()):
                running = list(self._victims)
                self._schedule_running(running)
                if len(self._running) == len(running) and not self._suspects:
                    self._admit()
            self._planned = plan = self.cache.plan(list(self._steps.values())) if self._steps else None
            self._rows.update({step.row: request for request, step in self._steps.items()})
        return plan

    def _awaits_tokens(self) -> bool:
        """Tell whether a running request needs unread tokens. All wait, else halves of the batch alternate."""
        drafts = self._drafts is not None and not self._drafts.ahead
        for request in self._running:
            needy = bool(drafts or request.siblings or request.params.penalizes)
            most = 0 if needy else 1  # a late row alone in flight has a known start
            if (needy or request.late) and self.cache.progress(request.request_id).in_flight > most:
                return True
        return False

    def _schedule_alone(self) -> bool:
        """Run one request of a failed step alone."""
        suspect = min(self._suspects, key=lambda request: request.arrival)
        if suspect not in self._running:
            if len(self._running) >= self._max_num_seqs or isinstance(self.cache.admit(suspect.request_id), Wait):
                return False
            self._run(suspect)
        self._schedule_running([suspect])
        return bool(self._steps)

    def _schedule_running(self, requests: Sequence[Request]) -> None:
        rows = [(request, self.cache.progress(request.request_id)) for request in requests]
        rows.sort(key=lambda row: row[1].computed < row[1].prefill_end)
        drafts: Mapping[Request, Guess] = {}
        if self._drafts is not None:
            most = min(self.cache.config.max_draft_tokens, self._budget - len(rows))
            drafts = self._drafts.propose({
                request: min(most, drafts_room(request, at)) for request, at in rows if at.computed >= at.prefill_end
            })  # fmt: skip
        for left, (request, progress) in zip(range(len(rows), 0, -1), rows, strict=True):
            if self._budget > 0 and not request.waiting:
                room = self._budget - left  # every row left needs a token
                guess = drafts.get(request, NO_GUESS).cut(max(room, 0)) if drafts else NO_GUESS
                self._schedule_row(request, progress, guess)

    def _admit(self) -> None:
        line, in_flight = self._waiting, []
        line.wake(lambda request: self.cache.waits(request.request_id))
        while self._budget > 0 and len(self._running) < self._max_num_seqs:
            request, passed = line.first(), line.longest_passed()
            if request is None:
                break
            if passed is not None and self._enough_passed(passed, request):
                break
            found = self.cache.admit(request.request_id)
            if not isinstance(found, Wait):
                self._run(request)
                if not self._schedule_row(request, self.cache.progress(request.request_id)):
                    break
            elif found.reason in ("prefix", "loading"):
                line.set_aside(found.on, found.until, self._admissions)
            elif found.reason == "in flight":
                line.pop()
                in_flight.append(request)
            else:
                break  # no room: none may overtake it
        for request in in_flight:
            line.push(request)

    def _enough_passed(self, passed: Request, request: Request) -> bool:
        assert passed.passed_at is not None
        return request.arrival > passed.arrival and self._admissions - passed.passed_at >= self._max_num_seqs

    def _run(self, request: Request) -> None:
        self._admissions += 1
        request.waiting, request.passed_at = False, None
        self._running[request] = None

    def _schedule_row(self, request: Request, progress: Progress, drafts: Guess = NO_GUESS) -> bool:
        if progress.computed < progress.prefill_end:
            num_tokens = self._prefill_tokens(request, progress.computed, progress.prefill_end)
        else:
            num_tokens = int(progress.in_flight + len(request.output) < request.params.max_tokens)
        if not num_tokens:
            return False
        guessed, parents = drafts
        while (step := self.cache.allocate(request.request_id, num_tokens, drafts=guessed, parents=parents)) is None:
            if guessed:
                guessed, parents = drafts.cut(len(guessed) - 1)
            elif not self._preempt_younger(request):
                return False
        if step.prefill and request.params.prompt_logprobs is not None:
            step = step._replace(prompt_logits=True)
        self._budget -= step.num_tokens
        self._steps[request], request.drafted, request.late = step, len(step.drafts), step.unplaced_by > 0
        return True

    def _prefill_tokens(self, request: Request, computed: int, prefill_end: int) -> int:
        budget = min(self._budget, self._long_prefill or self._budget)
        num_tokens = self.cache.next_tokens(request.request_id, budget)
        end = computed + num_tokens
        if end == prefill_end or end % self.cache.config.block_size == 0:
            return num_tokens
        last = next(reversed(self._steps.values()), None)  # prefill rows come last
        return 0 if last is not None and last.prefill else num_tokens

    def _preempt_younger(self, request: Request) -> bool:
        """Preempt the youngest later request without a row."""
        while self._victims and self._victims[-1].arrival > request.arrival:
            victim = self._victims.pop()
            if victim not in self._steps:
                self.cache.preempt(victim.request_id)
                del self._running[victim]
                self._waiting.push(victim)
                return True
        return False

    # --- transfers ---

    def transfers(self, ended: Mapping[Transfer, bool], flush: bool = False) -> tuple[Transfer, ...]:
        """Report known `ended` transfers, by whether they failed; return `PrefixCache.transfers`."""
        self._mend()
        with self._change():
            for transfer in self.cache.transfers(flush=flush) if ended else ():
                if transfer in ended:
                    self.cache.transferred(transfer, failed=ended[transfer])
            return self.cache.transfers(flush=flush)

    # --- results ---

    def issued(self, plan: StepPlan) -> None:
        """Note a forward pass on the stream."""
        self._mend()
        self.cache.issued(plan.steps)
        self._planned = None
        for step in plan.steps:
            request = self._rows.get(step.row)
            news = request is not None and (request.report is None or request in self._suspects)
            if request is not None and news and self.cache.is_live(step):
                self._suspects.discard(request)
                if request.finish_reason is None:
                    request.report = self.cache.report(request.request_id)

    def failed(self, plan: StepPlan, error: Exception | None) -> list[Request]:
        """Take back a step that raised. Its requests run alone, and end with the error if they fail again.

        `error` is None if no request is to blame. Return `take_touched`.
        """
        self._failing += plan.steps  # first: a lost row stays in flight forever
        untold = self._planned not in (None, plan)  # never issued
        torn = self._torn or untold or len(self._failing) > len(plan.steps)
        alone = len(plan.steps) == 1 and self.cache.is_live(plan.steps[0])  # else an earlier step failed
        rows = [self._rows.get(step.row) for step in plan.steps]
        if torn:
            self._mend()
        with self._change():
            self._take_back()
            requests = [request for request in rows if request is not None and request.finish_reason is None]
            for request in [each for each in self._running if not self.cache.runs(each.request_id)]:
                del self._running[request]
                self._waiting.push(request)
            if error is not None and alone:
                for request in requests:
                    request.fail(error)
                self._end(requests)
            elif error is not None:
                self._suspects.update(requests)
        return self.take_touched()

    def _take_back(self) -> None:
        failing = {step.row: step for step in self._failing}
        self.cache.cancel([step for step in failing.values() if self.cache.under_way(step)])
        for row in failing:
            self._rows.pop(row, None)
        self._failing, self._planned = [], None

    def update(self, plan: StepPlan, sampled: Sequence[Sequence[int]]) -> list[Request]:
        """Accept the tokens of a step; return `take_touched`.

        A row's tokens follow each token of a decode row, or begin each answer where a prompt ends. `NOT_FINITE` ends a
        request with an error.
        """
        self._mend()
        with self._change():
            self._accept(plan, sampled)
        return self.take_touched()

    def _accept(self, plan: StepPlan, sampled: Sequence[Sequence[int]]) -> None:
        accepted: dict[str, list[int]] = {}
        ends: dict[Request, tuple[list[int], FinishReason | None]] = {}
        freed_bad: set[str] = set()
        for step, tokens in zip(plan.steps, sampled, strict=True):
            request = self._rows.get(step.row)
            if request is None or request.finish_reason or not (step.samples and self.cache.is_live(step)):
                if NOT_FINITE in tokens:
                    freed_bad.add(step.request_id)
                continue
            given = [tokens[place] for place in agreed(step, tokens)] if step.drafts else tokens[:1]
            sound = given[: given.index(NOT_FINITE)] if NOT_FINITE in given else given
            taken, reason = self._until_stop(request, sound)
            if reason is None and len(sound) < len(given):
                request.fail_numerically(step, len(taken))
                reason = request.finish_reason
            ends[request], accepted[step.request_id] = (taken, reason), taken
            if step.drafts:
                start = len(request.prompt) + len(request.output) - 1  # a late row ends with its log
                request.num_draft_tokens += min(len(step.drafts), FOLD - 1 - start % FOLD)
                request.num_accepted_tokens += len(given) - 1
        self.cache.accept(plan.steps, accepted, not_finite=freed_bad)
        for request, (taken, reason) in ends.items():
            self._take(request, taken, reason)
        for step, tokens in zip(plan.steps, sampled, strict=True):
            request = self._rows.pop(step.row, None)
            if request is not None and request.siblings and request in ends and request.output:
                self._fork(request, tokens[1:])
        self._end([request for request in self._touched if request.finish_reason is not None])

    def _until_stop(self, request: Request, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        try:
            return request.until_stop(tokens)
        except Exception as error:  # ends only this request
            logger.exception("the tokens of %s could not be taken", request.request_id)
            request.fail(error)
            return [], request.finish_reason

    def _take(self, request: Request, tokens: Sequence[int], reason: FinishReason | None) -> None:
        self._touched[request] = None
        request.finish_reason = reason  # first: `_mend` cannot restore it
        request.output += tokens

    def _fork(self, request: Request, tokens: Sequence[int]) -> None:
        """Begin the further answers."""
        begun = {sibling: token for sibling, token in zip(request.siblings, tokens, strict=True)}
        begun = {sibling: token for sibling, token in begun.items() if sibling.finish_reason is None}
        ends = {sibling: self._until_stop(sibling, [token]) for sibling, token in begun.items()}
        room = max(self._max_num_seqs - len(self._running), 0)
        children = {sibling.request_id: token for sibling, token in begun.items()}
        running = set(self.cache.fork(request.request_id, children, max_running=room))
        request.siblings = []
        for sibling, (taken, reason) in ends.items():
            sibling.report = request.report
            self._take(sibling, taken, reason)
            if sibling.request_id in running:
                self._running[sibling] = None
            else:
                self._waiting.push(sibling)

    def _end(self, requests: Sequence[Request]) -> None:
        """Forget ended requests and their siblings."""
        for request in requests:
            for sibling in request.siblings:
                if sibling.finish_reason is None:
                    sibling.error, sibling.finish_reason = request.error, request.finish_reason
        for request in [*requests, *(sibling for each in requests for sibling in each.siblings)]:
            if self.requests.get(request.request_id) is not request:
                continue  # the id may be in use again
            self._touched[request] = None  # first: an exception may follow
            self._suspects.discard(request)
            request.waiting = False
            if self.cache.knows(request.request_id):
                finished = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                self.cache.free(request.request_id, finished=finished, wrong_from=request.wrong_from)
            self._running.pop(request, None)
            del self.requests[request.request_id]
        if not self.requests:
            self._rows.clear()

    def take_touched(self) -> list[Request]:
        """Return requests with new tokens or an end, once."""
        touched, self._touched = list(self._touched), {}
        return touched

    @contextmanager
    def _change(self, refusal: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Let the next call repair the records after an exception other than `refusal`."""
        self._torn = True
        try:
            yield
        except refusal:
            self._torn = False
            raise
        self._torn = False

    def _mend(self) -> None:
        """Put all requests back in line after an interrupted change."""
        if not (self._torn or self._failing):
            return
        cache, self._torn = self.cache, True
        if self._planned is not None:
            self._failing += self._planned.steps
        self._take_back()
        cache.abandon()
        for request_id in set(cache.request_ids) - set(self.requests):
            cache.free(request_id, finished=False)
        self._waiting, self._running, self._steps = WaitingLine(), {}, {}
        unborn: set[Request] = set()
        ended: list[Request] = []
        for request in sorted(self.requests.values(), key=lambda r: r.arrival):  # siblings follow their request
            if cache.knows(request.request_id) and request.finish_reason not in (
                FinishReason.ABORT,
                FinishReason.ERROR,
            ):
                accepted = list(cache.tokens(request.request_id)[len(request.prompt) + len(request.output) :])
                if request.finish_reason is not None:
                    self._take(request, accepted, request.finish_reason)
                elif accepted:
                    self._take(request, *self._until_stop(request, accepted))
            if request.finish_reason is not None:
                ended.append(request)
            elif not request.output:
                unborn.update(request.siblings)
            if request.output:
                request.siblings = []
            if request.finish_reason is None and request not in unborn:
                if not cache.knows(request.request_id):
                    self._add_to_cache(request)
                request.passed_at = None
                self._waiting.push(request)
        self._end(ended)
        self._torn = False
