"""Steps as transactions: the tokens of each are taken, or it is failed, whatever is raised on the way."""

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
    """A step from when it is planned until its tokens are taken, or it failed."""

    plan: StepPlan | None = None  # while it is being made
    answers: Sequence[Answers] = ()  # one for each of its rows
    launched: Launched | None = None


class Stepper:
    """Runs the requests of an engine step by step, and keeps their outputs up to date.

    On a GPU it is a step ahead: the next one is planned and launched before the tokens of this one are read, so that
    the device has work meanwhile. A request that ends with this one has run one row in vain.

    Its methods are for one caller at a time, and `settle` puts in order what they leave behind if they raise: see
    `alone`.

    Args:
        scheduler: plans steps, and is told what became of them.
        runner: executes them.
        device: where it does so.
        tier: runs the transfers between device and host, if there is one.
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
        self.answers: dict[str, Answers] = {}  # by the id of each of their requests
        self.fresh: dict[str, Answers] = {}  # whose output has news that were not given yet
        self.giving: list[Answers] = []  # whose outputs the call under way will return
        self.given: list[Answers] = []  # whose outputs the last call returned
        self.left: deque[Answers] = deque()  # that nobody waits for once the call under way is over
        self.steps_ahead = int(device.type == "cuda")  # launched before one is read; a CPU runs them at once
        self._stale: dict[str, Answers] = {}  # that a step ran since their output was brought up to date
        self._flights: deque[Flight] = deque()  # oldest first
        self._advancing = False  # or broken off in it: what is in flight is in disorder
        self._failure: str | None = None
        self.closed = False

    @property
    def idle(self) -> bool:
        """Whether every request has ended and its output was given."""
        over = {answers for answers in self.given if answers.output.finished}
        return all(answers in over for answers in chain(self.answers.values(), self.fresh.values()))

    def add(self, answers: Answers) -> None:
        """Puts requests in line.

        Raises:
            RuntimeError: the device has failed.
        """
        self._check_device_works()
        self.answers.update((request.request_id, answers) for request in answers.requests)
        self._scheduler.add(answers.requests[0])

    def advance(self) -> None:
        """Takes the tokens of one step, and brings up to date the outputs of the requests that it brought on.

        An exception ends the step and not its requests. They run again, one to a step, and a request whose step fails
        alone ends with the error. An exception that is no `Exception`, such as Ctrl-C, goes on to the caller.

        Raises:
            RuntimeError: the device has failed; or nothing can run although requests are left.
            Exception: from planning a step, which failed several times in a row.
        """
        if self._failure is not None and self.fresh:
            return  # not all know yet that their requests ended
        self._check_device_works()
        self._advancing = True
        self._move(ended=True)  # what has come is found by the requests that wait for it
        moving = False
        while len(self._flights) <= self.steps_ahead:
            self._flights.append(Flight())
            plan = self._flights[-1].plan = self._plan()  # in one line: an interrupt finds it there
            moving = self._move()
            if plan is None:
                self._flights.pop()
                break
            if not self._launch(plan):
                break
        if self._flights:
            self._read()
        elif plan is None and moving and self.answers:
            self._wait_for_transfer()
        elif plan is None:
            self._check_all_ended()
        self._advancing = False
        self._refresh()

    def close(self) -> None:
        """Ends all requests, writes to files what they lack, if there are any, and lets go of the runner."""
        self.left.extend(dict.fromkeys(chain(self.answers.values(), self.fresh.values())))
        self.settle()
        self.closed = True
        try:
            while self._failure is None and self._tier is not None and self._tier.has_files and self._move(flush=True):
                self._wait_for_transfer()
        finally:
            del self._runner
            if self._tier is not None and self._failure is None:
                self._tier.close()
            self._tier = None

    def settle(self) -> None:
        """Fails steps whose call was broken off, ends the requests that nobody waits for, refreshes outputs; and
        forgets whose last output the call before returned."""
        while self.given:
            self.hand_out(self.given[-1])
            self.given.pop()
        if self._advancing:
            self._fail(KeyboardInterrupt("the step was interrupted"))
            self._advancing = False
        while self.left:
            self._abort(self.left[0])
            self.left.popleft()
        while self._flights and self._failure is None and not self._scheduler.requests:
            self._read()  # a failed step would take the states of its ended requests with it
        if self._failure is not None:
            self._end_all(self._failure)
        self._refresh()

    def hand_out(self, answers: Answers) -> RequestOutput:
        """The output of requests with news; it is given for the last time when they have ended."""
        output = answers.hand_out()
        if output.finished:
            self._forget(answers)
        else:
            self.fresh.pop(answers.request_id, None)
        return output

    def give(self) -> list[RequestOutput]:
        """The outputs with news. They are given once more if the call under way breaks off before it returns."""
        self.giving = list(self.fresh.values())
        return [answers.show() for answers in self.giving]

    def next_output(self, answers: Answers) -> RequestOutput | None:
        """Runs steps until requests have news; None if they have ended and all was given."""
        while self.answers.get(answers.request_id) is answers:
            if answers.request_id in self.fresh:
                return self.hand_out(answers)
            self.advance()
        return None

    # --- inside ---

    def _plan(self) -> StepPlan | None:
        for _ in range(PLANNING_ATTEMPTS - 1):
            try:
                return self._scheduler.schedule()
            except Exception:
                logger.exception("planning a step failed: it is tried again")
        return self._scheduler.schedule()

    def _launch(self, plan: StepPlan) -> bool:
        """Launches the newest step, whose plan this is; whether that went well."""
        flight = self._flights[-1]
        unread = self._flights[-2].launched if len(self._flights) > 1 else None
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
        """Takes the tokens of the oldest step."""
        flight = self._flights[0]
        plan = flight.plan
        assert plan is not None and flight.launched is not None
        here = [answers for answers in flight.answers if self.answers.get(answers.request_id) is answers]
        self._stale.update((answers.request_id, answers) for answers in here)
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
        """Test the blocks that requests without finite logits resumed from, and drop the bad blocks."""
        cache = self._scheduler.cache
        for step, row in zip(plan.steps, rows, strict=True):
            if NOT_FINITE in row.tokens and cache.counts(step) and (blocks := cache.suspects(step.request_id)):
                hashes, states, pages = zip(*blocks, strict=True)
                sound = self._runner.finite(states, pages)
                cache.invalidate([each for each, is_sound in zip(hashes, sound, strict=True) if not is_sound])

    def _move(self, ended: bool = False, flush: bool = False) -> bool:
        """Tells which transfers are over, and launches those that are due; with `ended` only if any is over, with
        `flush` all that go to files. What is raised here costs a miss: it is tried again.

        Returns:
            Whether transfers are under way, as far as that is known. Without `flush` also whether any just ended: a
            request that waited for it runs soon.
        """
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
        return bool(under_way or (over and not flush))  # another flush would begin with all states again

    def _wait_for_transfer(self) -> None:
        """Nothing can run: requests that are left may wait for a transfer, or for what one holds."""
        assert self._tier is not None
        try:
            self._tier.wait()
        except Exception:
            failure = self._device_failure()
            if failure is None:
                raise
            self._end_all(failure)

    def _check_all_ended(self) -> None:
        """Nothing can run: with requests left, whoever waits for them would wait for ever."""
        self._stale.update((answers.request_id, answers) for answers in self.answers.values())
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

    def _fail(self, error: BaseException, first: Flight | None = None) -> None:
        """Fails a step in flight and those behind it, which go on from it and are not to blame; None for all."""
        at = 0 if first is None else self._flights.index(first)
        while len(self._flights) > at:
            try:
                if (plan := self._flights[at].plan) is not None:
                    self._note(self._scheduler.failed(plan, error))
            except Exception:  # it keeps its books in order whatever it raises, and a second call would tell it no more
                logger.exception("a failed step was not taken back in order")
            del self._flights[at]
            error = KeyboardInterrupt("the step before it failed")

    def _note(self, touched: Sequence[Request]) -> None:
        """Requests that got tokens or ended, not all of them in this step: their outputs are out of date."""
        for request in touched:
            answers = self.answers.get(request.request_id)
            if answers is not None:
                self._stale[answers.request_id] = answers

    def _device_failure(self) -> str | None:
        """What to say if the device fails from now on whatever it is asked, as CUDA does after an error in a kernel."""
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
            self.fresh[answers.request_id] = answers

    def _refresh(self) -> None:
        for request_id, answers in list(self._stale.items()):  # what is raised leaves the rest stale
            answers.refresh()
            if answers.has_news:
                self.fresh[request_id] = answers
            del self._stale[request_id]

    def _abort(self, answers: Answers) -> None:
        if answers not in (self.answers.get(answers.request_id), self.fresh.get(answers.request_id)):
            return  # forgotten, and the id may be another's by now
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

    def _forget(self, answers: Answers) -> None:
        self._stale.pop(answers.request_id, None)
        for request in answers.requests:
            self.answers.pop(request.request_id, None)
        self.fresh.pop(answers.request_id, None)  # at last: cut short, they are given or ended once more


class HasStepper(Protocol):
    _stepper: Stepper


P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H", bound=HasStepper)


def alone(method: Callable[Concatenate[H, P], T]) -> Callable[Concatenate[H, P], T]:
    """A method that only one caller at a time may be inside of, be it this one or another that is so marked.

    What a call leaves behind is settled when it ends, and once more before the next: the first may be cut short, as by
    a second Ctrl-C.

    Raises:
        RuntimeError: another call is under way; or the engine is closed.
    """

    @wraps(method)
    def guarded(self: H, *args: P.args, **options: P.kwargs) -> T:
        stepper = self._stepper
        if stepper.lock.locked():
            raise RuntimeError(
                "another call is inside this LLM: call it from one thread at a time, and not out of its own tokenizer "
                "or draft source"
            )
        # Not an acquire that gives up: an interrupt right after it would leave the lock taken for good. Of two threads
        # that both found it open the second one waits.
        with stepper.lock:
            if stepper.closed:
                raise RuntimeError("this LLM is closed: make a new one")
            stepper.giving = []
            try:
                stepper.settle()
                result = method(self, *args, **options)
            finally:
                stepper.settle()
            stepper.given = stepper.giving  # at last: the caller has them
            return result

    return guarded
