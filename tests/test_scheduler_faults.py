"""Raise MemoryError on any line of the scheduler: each request ends or gets the right tokens, and no block leaks.

The host works as an engine does. It reports a failed step once, even if that call raises.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mambacache
from mambacache.config import SamplingParams
from mambacache.plan import StepPlan
from mambacache.scheduler.request import FinishReason, Request
from symbolic import text
from test_scheduler_steps import Steps
from traced import traced
from watched_cache import all_free

STRIDE = 5
FOLDERS = [str(Path(mambacache.__file__).parent / name) for name in ("scheduler", "cache")]


class Fault:
    """Raise on line `number`, from 1 on, of the lines that a call runs in `paths`."""

    def __init__(self, number: int, paths: list[str]) -> None:
        self._left, self._paths = number, tuple(paths)
        self.raised = False

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._paths):
            return None
        if event == "line" and not self.raised:
            self._left -= 1
            if not self._left:
                self.raised = True
                raise MemoryError
        return self._trace

    def planted(self) -> AbstractContextManager[None]:
        return traced(self._trace)


class Host(Steps):
    """Keep a step in flight. A right token counts the tokens before it; sibling k adds 5 * k to its first token."""

    def __init__(self) -> None:
        super().__init__({"num_state_blocks": 7, "num_kv_blocks": 9}, max_num_batched_tokens=100)
        self.answers: list[Request] = []
        self.flights: deque[StepPlan] = deque()
        for name, length, n in (("a", 150, 1), ("b", 130, 3), ("c", 20, 1)):
            self.add_request(self.request(name, length, n))

    def request(self, name: str, length: int, n: int) -> Request:
        prompt, params = text(128)[:length] + text(length - 128, length), SamplingParams(max_tokens=9, n=n)
        answers = [Request(f"{name}{k}", prompt, params) for k in range(n)]
        answers[0].siblings = answers[1:]
        self.answers += answers
        return answers[0]

    def add_request(self, request: Request) -> None:
        self.scheduler.add(request)

    def sampled(self, plan: StepPlan) -> list[list[int]]:
        rows = []
        for step in plan.steps:
            request = next(each for each in self.answers if each.request_id == step.request_id)
            begun = int(step.request_id[1:]) if not request.output else 0
            after = step.start + step.num_tokens
            rows.append([after + 5 * (begun + k) for k in range(1 + len(request.siblings))] if step.samples else [])
        return rows

    def issue(self) -> bool:
        """Issue the next step; return False if there is none."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.scheduler.issued(plan)
            self.flights.append(plan)
        return plan is not None

    def read(self) -> None:
        if self.flights:
            plan = self.flights.popleft()
            self.scheduler.update(plan, self.sampled(plan))

    def step(self) -> None:
        if not self.issue() or len(self.flights) > 1:
            self.read()

    def fail(self, *plans: StepPlan, fault: Fault | None = None) -> None:
        """Fail steps. A call that raises is not repeated."""
        for plan in plans:
            with suppress(MemoryError), (fault or Fault(0, [])).planted():
                self.scheduler.failed(plan, RuntimeError("the device failed"))

    def finish(self) -> None:
        for _ in range(300):
            if self.scheduler.idle and not self.flights:
                break
            if not self.issue() or len(self.flights) > 1:
                assert self.flights or self.scheduler.idle, "requests are left, and nothing runs"
                self.read()
            self.cache.check()
        assert self.scheduler.idle and not self.scheduler._rows
        for request in self.answers:
            self.check(request)
        assert len({each.request_id[0] for each in self.answers if each.finish_reason is FinishReason.ERROR}) < 2
        all_free(self.cache)

    def check(self, request: Request) -> None:
        first, k = len(request.prompt), int(request.request_id[1:])
        right = [first + 5 * k, *range(first + 1, first + 9)]
        assert request.output == right[: len(request.output)], request.request_id
        assert request.finish_reason is not None
        assert (len(request.output) == 9) == (request.finish_reason is FinishReason.LENGTH)


# --- the calls that a fault breaks off ---


def add(host: Host, fault: Fault) -> None:
    request = host.request("d", 140, 2)
    with suppress(MemoryError), fault.planted():
        host.scheduler.add(request)
    if host.scheduler.requests.get("d0") is not request:
        host.scheduler.add(request)


def schedule(host: Host, fault: Fault) -> None:
    with suppress(MemoryError), fault.planted():
        if (plan := host.scheduler.schedule()) is not None:
            sys.settrace(None)
            host.scheduler.issued(plan)
            host.flights.append(plan)


def issued(host: Host, fault: Fault) -> None:
    if (plan := host.scheduler.schedule()) is not None:
        try:
            with fault.planted():
                host.scheduler.issued(plan)
            host.flights.append(plan)
        except MemoryError:
            host.fail(plan)


def update(host: Host, fault: Fault) -> None:
    if host.flights:
        try:
            with fault.planted():
                host.scheduler.update(host.flights[0], host.sampled(host.flights[0]))
            host.flights.popleft()
        except MemoryError:
            host.fail(*host.flights)
            host.flights.clear()


def failed(host: Host, fault: Fault) -> None:
    plans, _ = list(host.flights), host.flights.clear()
    host.fail(*plans, fault=fault)


def failed_before_it_was_issued(host: Host, fault: Fault) -> None:
    if (plan := host.scheduler.schedule()) is not None:
        host.fail(plan, fault=fault)


def failed_alone(host: Host, fault: Fault) -> None:
    """Fail a step again after a failure of several requests."""
    host.fail(*host.flights)
    host.flights.clear()
    failed_before_it_was_issued(host, fault)


def schedule_before_all_are_aborted(host: Host, fault: Fault) -> None:
    schedule(host, fault)
    for request in host.answers:
        host.scheduler.abort(request.request_id)


def abort(name: str) -> Callable[[Host, Fault], None]:
    def call(host: Host, fault: Fault) -> None:
        with suppress(MemoryError), fault.planted():
            host.scheduler.abort(name)
        request = next(each for each in host.answers if each.request_id == name)
        if request.finish_reason is not None and host.issue():
            assert name not in host.scheduler.requests

    return call


def transfers(host: Host, fault: Fault) -> None:
    with suppress(MemoryError), fault.planted():
        host.scheduler.transfers({})


CALLS: dict[str, Callable[[Host, Fault], None]] = {
    "add": add, "schedule": schedule, "issued": issued, "update": update, "transfers": transfers, "failed": failed,
    "failed before it was issued": failed_before_it_was_issued, "failed alone": failed_alone,
    "schedule before all are aborted": schedule_before_all_are_aborted, "abort of one that runs": abort("a0"),
    "abort of the first of several": abort("b0"), "abort of the last of several": abort("b2"),
    "abort of one that waits": abort("c0"),
}  # fmt: skip


def broken_off(call: str, steps: int, number: int, paths: list[str]) -> bool:
    """Run some steps, then a call that raises on a line, then all the rest; return whether it raised."""
    host, fault = Host(), Fault(number, paths)
    for _ in range(steps):
        host.step()
    CALLS[call](host, fault)
    host.finish()
    return fault.raised


def lines_broken_off(call: str, steps: int, stride: int, paths: list[str]) -> int:
    """Break a call off on one line after the other, and count the lines."""
    first = 2 if call.startswith("failed") else 1  # a host may repeat a call that raised before its first line
    for i in count():
        try:
            if not broken_off(call, steps, first + i * stride, paths):
                break
        except BaseException as error:
            error.add_note(f"line {first + i * stride} of {call} after {steps} steps")
            raise
    return i


@pytest.mark.parametrize("call", CALLS)
def test_a_call_may_raise_on_any_line_of_the_scheduler(call: str) -> None:
    assert sum(lines_broken_off(call, steps, 1, FOLDERS[:1]) for steps in (1, 3, 8)) >= 20


@pytest.mark.parametrize("call", CALLS)
def test_a_call_may_raise_on_any_line_of_scheduler_and_cache(call: str) -> None:
    assert lines_broken_off(call, 5, STRIDE, FOLDERS) >= 5
