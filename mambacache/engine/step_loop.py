"""Run steps as transactions."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from mambacache.engine.answers import Answers
from mambacache.engine.interrupts import Interrupts
from mambacache.engine.outputs import RequestOutput
from mambacache.plan import NOT_FINITE, StepPlan
from mambacache.runner.host_tier import HostTier
from mambacache.runner.model_runner import Launched, ModelRunner, RowOutput
from mambacache.scheduler.request import FinishReason, Request
from mambacache.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

PLANNING_ATTEMPTS = 3


@dataclass(eq=False)
class Flight:
    plan: StepPlan
    answers: Sequence[Answers] = ()  # by batch row
    launched: Launched | None = None


class StepLoop:
    """Run an engine's requests step by step.

    On a GPU the next step is launched before this step's tokens are read. Decorate callers with `alone`.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, device: torch.device, tier: HostTier | None = None
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._device = device
        self._tier = tier
        self._tier_failures = 0  # in a row
        self.lock = threading.Lock()
        self.interrupts = Interrupts()
        self.answers: dict[str, Answers] = {}  # by id of each request
        self.touched: dict[str, Answers] = {}  # with news
        self.shown: list[Answers] = []
        self.abandoned: deque[Answers] = deque()
        self.steps_ahead = int(device.type == "cuda")
        self._flights: deque[Flight] = deque()  # oldest first
        self._failure: str | None = None
        self.closed = False

    @property
    def idle(self) -> bool:
        over = {answers for answers in self.shown if answers.output.finished}
        return all(answers in over for answers in chain(self.answers.values(), self.touched.values()))

    def add(self, answers: Answers) -> None:
        self._check_device_works()
        self._scheduler.add(answers.requests[0])
        self.answers.update((request.request_id, answers) for request in answers.requests)

    def advance(self) -> None:
        """Take the tokens of one step, and update outputs.

        Requests of a failed step run again, each in its own step. A request that fails alone ends. Raise Ctrl-C between
        steps, and the error of `PLANNING_ATTEMPTS` failed plans.
        """
        if self._failure is not None and self.touched:
            return
        self._check_device_works()
        self.interrupts.check()
        try:
            self._advance()
        except BaseException:
            self._fail(None)
            raise
        self._refresh()
        self.interrupts.check()

    def close(self) -> None:
        """End all requests, write unsaved blocks to files, and release the runner."""
        for answers in list(dict.fromkeys(chain(self.answers.values(), self.touched.values()))):
            self.abort(answers)
        self.settle()
        self.closed = True
        try:
            while self._failure is None and self._tier is not None and self._tier.has_files and self._move(flush=True):
                self.interrupts.check()
                self._wait_for_transfer()
        finally:
            self.shut()

    def shut(self) -> None:
        """Release the runner; requests may be inconsistent."""
        self.closed = True
        vars(self).pop("_runner", None)
        for of_requests in (self.answers, self.touched, self.shown, self.abandoned, self._flights):
            of_requests.clear()
        tier, self._tier = self._tier, None
        if tier is not None and self._failure is None:
            tier.close()

    def begin(self) -> None:
        while self.shown:
            self.hand_out(self.shown.pop())
        self.settle()

    def settle(self) -> None:
        """Abort abandoned requests, and read steps in flight."""
        while self.abandoned:
            self.abort(self.abandoned.popleft())
        while self._flights and self._failure is None and not self._scheduler.requests:
            self._read()  # a failed step would drop the states of ended requests
        if self._failure is not None:
            self._end_all(self._failure)
        self._refresh()

    def abort(self, answers: Answers) -> None:
        if answers not in (self.answers.get(answers.request_id), self.touched.get(answers.request_id)):
            return  # the id is in use again
        try:
            for request in answers.requests:
                self._scheduler.abort(request.request_id)
        except Exception:
            logger.exception("aborting %s failed: it is forgotten", answers.request_id)
        try:
            answers.refresh()
        finally:
            answers.end(FinishReason.ABORT)
            self._forget(answers)

    def hand_out(self, answers: Answers) -> RequestOutput:
        output = answers.hand_out()
        if output.finished:
            self._forget(answers)
        else:
            self.touched.pop(answers.request_id, None)
        return output

    def give(self) -> list[RequestOutput]:
        """Return outputs with news; after an error the next call repeats them."""
        self.shown = list(self.touched.values())
        return [answers.show() for answers in self.shown]

    def next_output(self, answers: Answers) -> RequestOutput | None:
        while self.answers.get(answers.request_id) is answers:
            if answers.request_id in self.touched:
                return self.hand_out(answers)
            self.advance()
        return None

    def _advance(self) -> None:
        self._move(ended=True)
        plan, moving = None, False
        while len(self._flights) <= self.steps_ahead:
            plan = self._plan()
            moving = self._move()
            if plan is None:
                break
            self._flights.append(Flight(plan))
            if not self._launch(self._flights[-1]):
                break
        if self._flights:
            self._read()
        elif plan is None and moving and self.answers:
            self._wait_for_transfer()
        elif plan is None:
            self._check_all_ended()

    def _plan(self) -> StepPlan | None:
        for _ in range(PLANNING_ATTEMPTS - 1):
            try:
                return self._scheduler.schedule()
            except Exception:
                logger.exception("planning a step failed: it is tried again")
        return self._scheduler.schedule()

    def _launch(self, flight: Flight) -> bool:
        unread = self._flights[-2].launched if len(self._flights) > 1 else None
        plan = flight.plan
        try:
            flight.answers = [self.answers[step.request_id] for step in plan.steps]
            sampling = [answers.sampling(step) for answers, step in zip(flight.answers, plan.steps, strict=True)]
            flight.launched = self._runner.launch(plan, sampling, unread, self._scheduler.cache.tokens)
            self._scheduler.issued(plan)
        except Exception as error:
            self._contain(flight, error)
            return False
        return True

    def _read(self) -> None:
        flight = self._flights[0]
        plan = flight.plan
        assert flight.launched is not None
        for answers in flight.answers:
            if self.answers.get(answers.request_id) is answers:
                self.touched[answers.request_id] = answers
        try:
            rows = flight.launched.read()
            self._test_hits(plan, rows)
            for answers, step, row in zip(flight.answers, plan.steps, rows, strict=True):
                if row.logprobs or row.prompt_logprobs:
                    answers.keep_logprobs(step, row)
            self._note(self._scheduler.update(plan, [row.tokens for row in rows]))
            self._flights.popleft()
        except Exception as error:
            self._contain(flight, error)

    def _test_hits(self, plan: StepPlan, rows: Sequence[RowOutput]) -> None:
        """Drop the blocks of hits that led to NaN or infinite logits."""
        cache = self._scheduler.cache
        for step, row in zip(plan.steps, rows, strict=True):
            if NOT_FINITE in row.tokens and cache.is_live(step) and (blocks := cache.suspects(step.request_id)):
                hashes, states, pages = zip(*blocks, strict=True)
                sound = self._runner.finite(states, pages)
                cache.invalidate([each for each, is_sound in zip(hashes, sound, strict=True) if not is_sound])

    def _move(self, ended: bool = False, flush: bool = False) -> bool:
        """Report ended transfers and launch others (`ended`: only after an end); tell whether any may be under way."""
        if self._tier is None:
            return False
        try:
            over = self._tier.ended()
            if not over and ended:
                return True
            under_way = self._scheduler.transfers(over, flush)
            self._tier.launch(under_way)
            self._tier.forget(over)
        except Exception:
            self._tier_failures += 1
            logger.exception("the tier in host memory failed in this step")
            return self._tier_failures < PLANNING_ATTEMPTS
        self._tier_failures = 0
        return bool(under_way or (over and not flush))  # else `close` would flush all states again

    def _wait_for_transfer(self) -> None:
        assert self._tier is not None
        try:
            self._tier.wait()
        except Exception:
            failure = self._device_failure()
            if failure is None:
                raise
            self._end_all(failure)

    def _check_all_ended(self) -> None:
        self.touched.update((answers.request_id, answers) for answers in self.answers.values())
        self._refresh()
        left = {answers.request_id for answers in self.answers.values() if not answers.output.finished}
        if left:
            raise RuntimeError(f"nothing can run and {len(left)} requests are left: abort them, or make a new LLM")

    def _contain(self, flight: Flight, error: Exception) -> None:
        failure = self._device_failure()
        if failure is None:
            logger.exception("a step of %d requests failed", len(flight.answers))
            self._fail(error, flight)
        else:
            self._end_all(failure)

    def _fail(self, error: Exception | None, first: Flight | None = None) -> None:
        at = 0 if first is None else self._flights.index(first)
        while len(self._flights) > at:
            try:
                self._note(self._scheduler.failed(self._flights[at].plan, error))
            except Exception:  # a second call returns nothing more
                logger.exception("a failed step was not taken back in order")
            del self._flights[at]
            error = None

    def _note(self, requests: Sequence[Request]) -> None:
        for request in requests:
            answers = self.answers.get(request.request_id)
            if answers is not None:
                self.touched[answers.request_id] = answers

    def _device_failure(self) -> str | None:
        if self._device.type != "cuda":
            return None
        try:
            torch.cuda.synchronize(self._device)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            return f"the CUDA device failed ({type(error).__name__}: {reason}): start a new process"
        return None

    def _check_device_works(self) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _end_all(self, failure: str) -> None:
        if self._failure is None:
            logger.error(failure)
        self._failure = failure
        self._flights.clear()
        for answers in self.answers.values():
            answers.refresh()
            answers.end(FinishReason.ERROR, failure)
            self.touched[answers.request_id] = answers

    def _refresh(self) -> None:
        for request_id, answers in list(self.touched.items()):
            answers.refresh()
            if not answers.has_news:
                del self.touched[request_id]

    def _forget(self, answers: Answers) -> None:
        for request in answers.requests:
            self.answers.pop(request.request_id, None)
        self.touched.pop(answers.request_id, None)


class HasStepLoop(Protocol):
    _step_loop: StepLoop


P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H", bound=HasStepLoop)


def alone(method: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[H, P], T]:
    """Let a single caller into an engine; a second Ctrl-C closes it."""

    @wraps(method)
    def guarded(self: H, *args: P.args, **options: P.kwargs) -> T:
        step_loop = self._step_loop
        if step_loop.lock.locked():
            raise RuntimeError(
                "another call is inside this LLM: call it from one thread at a time, and not out of its own tokenizer "
                "or draft source"
            )
        # With acquire(blocking=False), Ctrl-C could leave the lock taken.
        with step_loop.lock:
            if step_loop.closed:
                raise RuntimeError("this LLM is closed: make a new one")
            try:
                with step_loop.interrupts:
                    step_loop.begin()
                    try:
                        return method(self, *args, **options)
                    finally:
                        step_loop.settle()
            except BaseException:
                step_loop.shown = []
                if step_loop.interrupts.count > 1:
                    step_loop.shut()
                raise

    return guarded
