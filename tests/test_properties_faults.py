"""Raise on any line of `cache/` and `scheduler/`: a fault may empty the cache, but costs no answer and no block.

A trace function raises after a random number of lines of these folders.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mambacache
from mambacache.plan import StepPlan
from mambacache.scheduler.request import FinishReason
from mixes import mixes
from symbolic import text
from symbolic_driver import Driver, Job, Mix
from test_properties import any_mix
from traced import traced

PACKAGE = Path(mambacache.__file__).parent
FOLDERS = tuple(str(PACKAGE / folder) for folder in ("cache", "scheduler"))


class PlantedError(Exception):
    """Stand for an ordinary error of a program."""


MAX_FAULTS = 15  # in a mix: with small steps, endless faults would let no request finish


class Faults:
    """Raise on a line of `paths`, after `every` lines on average."""

    def __init__(
        self, seed: int, every: float, kinds: tuple[type[BaseException], ...], paths: tuple[str, ...] = FOLDERS
    ) -> None:
        self.paths = paths
        self.rng = random.Random(seed)
        self.every, self.kinds = every, kinds
        self.left = self._next()
        self.raised = 0
        self.places: set[tuple[str, int]] = set()

    def _next(self) -> int:
        return 1 + int(self.rng.expovariate(1 / self.every))

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.paths):
            return None
        if event == "line":
            self.left -= 1
            if not self.left and self.raised < MAX_FAULTS:
                self.left = self._next()
                self.raised += 1
                self.places.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
                raise self.rng.choice(self.kinds)("planted")
        return self._trace

    def planted(self) -> AbstractContextManager[None]:
        return traced(self._trace)


class FaultyDriver(Driver):
    """Handle faults as an engine does: report the step to `failed`, and go on."""

    def __init__(self, mix: Mix, faults: Faults) -> None:
        super().__init__(mix)
        self.faults = faults
        self.under_way: list[tuple[StepPlan, BaseException]] = []  # plans to report to `failed`

    def submit(self, index: int) -> None:
        first = f"{index}.0"
        while (index, 0) not in self.requests or not self._is_in(first):
            try:
                with self.faults.planted():
                    super().submit(index)
            except self.faults.kinds:
                continue

    def _is_in(self, name: str) -> bool:
        request = self.requests[int(name.split(".")[0]), 0]
        return request.finish_reason is not None or self.scheduler.requests.get(name) is request

    def abort(self, request_id: str) -> None:
        while request_id in self.scheduler.requests:
            try:
                with self.faults.planted():
                    super().abort(request_id)
            except self.faults.kinds:
                continue

    def step(self) -> None:
        try:
            with self.faults.planted():
                self._fail_first()
                plan = self.scheduler.schedule()
        except self.faults.kinds:
            return
        if plan is None:
            if self.plans:
                self.read()
            return
        outputs = self.cache.runner.execute(plan, [self._answers(step) for step in plan.steps])
        try:
            with self.faults.planted():
                self.scheduler.issued(plan)
        except self.faults.kinds as error:
            self.under_way.append((plan, error))
            return
        self.plans.append((plan, outputs))
        if len(self.plans) > self.mix.ahead:
            self.read()

    def read(self) -> None:
        plan, outputs = self.plans.popleft()
        try:
            with self.faults.planted():
                self._fail_first()
                self.scheduler.update(plan, outputs)
        except self.faults.kinds as error:
            self.under_way.append((plan, error))

    def _fail_first(self) -> None:
        while self.under_way:
            plan, error = self.under_way[0]
            self.scheduler.failed(plan, error if isinstance(error, Exception) else None)
            self.under_way.pop(0)

    def run(self) -> FaultyDriver:
        super().run()
        return self


@st.composite
def faulty_mixes(draw: st.DrawFn) -> tuple[Mix, Faults]:
    mix = draw(any_mix(drafts=draw(st.integers(0, 3)) == 0))
    kinds = draw(st.sampled_from([(KeyboardInterrupt,), (PlantedError,), (PlantedError, KeyboardInterrupt)]))
    return mix, Faults(draw(st.integers(0, 1 << 30)), draw(st.sampled_from([600, 1500, 4000])), kinds)


@mixes(110)
@given(faulty_mixes())
def test_a_fault_on_any_line_costs_no_answer_and_no_block(faulty: tuple[Mix, Faults]) -> None:
    FaultyDriver(*faulty).run()


@pytest.mark.full
def test_faults_are_planted_all_over_cache_and_scheduler() -> None:
    places: set[tuple[str, int]] = set()
    for seed in range(40):
        jobs = [Job(text(150) + text(40, i), 30, n=1 + i % 2) for i in range(4)]
        d = FaultyDriver(Mix(jobs, budget=100, cache={"num_state_blocks": 12, "num_kv_blocks": 30}),
                         Faults(seed, 200, (KeyboardInterrupt,))).run()  # fmt: skip
        assert all(request.finish_reason is FinishReason.LENGTH for request in d.requests.values())
        places |= d.faults.places
    files = {name for name, _ in places}
    assert {"prefix_cache.py", "admission.py", "states.py", "pages.py", "lookup.py", "pool.py", "scheduler.py"} <= files
    assert len(places) > 150


@pytest.mark.parametrize("kind", [PlantedError, KeyboardInterrupt])
def test_without_faults_nothing_is_rebuilt(kind: type[BaseException]) -> None:
    jobs = [Job(text(150) + text(40, i), 30) for i in range(4)]
    d = FaultyDriver(Mix(jobs, cache={"num_state_blocks": 12, "num_kv_blocks": 30}), Faults(0, 1e12, (kind,))).run()
    assert d.cache.rebuilt == d.faults.raised == 0 and d.cache.stats.preemptions == 0
