"""How much of the host's time in a step of vLLM is spent in the plugin."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

CALLS = ("add", "admit", "match", "waits", "chunk", "allocate", "plan_rows", "issued", "accept", "preempt", "free")


class HostTime:
    """Seconds inside watched methods, step by step. Calls of one inside another count once."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._spent, self._inside = 0.0, False

    def end_step(self) -> None:
        self.steps.append(self._spent)
        self._spent = 0.0

    def watched(self, method: Any) -> Any:
        @wraps(method)
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return method(*args, **options)
            self._inside, start = True, time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self._inside = False
                self._spent += time.perf_counter() - start

        return timed


@contextmanager
def host_time(scheduler: Any) -> Iterator[HostTime]:
    """Watches the cache, and what sends its rows and reads them, of an engine core in this process."""
    from mambacache import PrefixCache
    from mambacache.vllm.rows import Sender
    from mambacache.vllm.step_context import StepContext

    found, schedule = HostTime(), scheduler.schedule
    places = [(PrefixCache, name) for name in CALLS] + [(Sender, "columns")]
    places += [(StepContext, name) for name in ("receive", "begin", "end")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]

    def next_step(*args: Any, **options: Any) -> Any:
        found.end_step()
        return schedule(*args, **options)

    for owner, name, method in originals:
        setattr(owner, name, found.watched(method))
    scheduler.schedule = next_step
    try:
        yield found
    finally:
        scheduler.schedule = schedule
        for owner, name, method in originals:
            setattr(owner, name, method)
