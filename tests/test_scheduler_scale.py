"""Check that calls take time in proportion to the number of requests."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mambacache.config import SamplingParams
from mambacache.scheduler.request import Request
from selection import full
from symbolic import text
from test_scheduler_steps import Steps

FEW, MANY = 1000, 16_000
MOST = 3 * MANY / FEW
"""Times as long as for a few; a quadratic part makes it more than 60."""


@contextmanager
def without_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds(call: Callable[[], object]) -> float:
    with without_collections():
        begun = time.process_time()
        call()
        return time.process_time() - begun


def prompt_with_answers(n: int, length: int, **cache: int) -> tuple[Steps, Request]:
    s = Steps({"num_state_blocks": 2 * n, "max_checkpoints": 0, **cache}, max_num_batched_tokens=n, max_num_seqs=n)
    request = Request("0", text(length), SamplingParams(max_tokens=20, n=n))
    request.siblings = [Request(str(i), request.prompt, request.params) for i in range(1, n)]
    return s, request


def begin(s: Steps) -> None:
    """Compute the prompt, and begin its answers."""
    plan = s.plan()
    s.scheduler.issued(plan)
    n = len(s.scheduler.requests)
    s.scheduler.update(plan, [[i % 40 for i in range(n)]])
    assert len(s.scheduler._running) == n


def adding(n: int) -> float:
    s, request = prompt_with_answers(n, 10)
    return seconds(lambda: s.scheduler.add(request))


def beginning(n: int) -> float:
    s, request = prompt_with_answers(n, 10, num_kv_blocks=2 * n)
    s.scheduler.add(request)
    return seconds(lambda: begin(s))


def aborting(n: int) -> float:
    s, request = prompt_with_answers(n, 10, num_kv_blocks=2 * n)
    s.scheduler.add(request)
    begin(s)
    ids = list(s.scheduler.requests)

    def abort() -> None:
        for request_id in reversed(ids):
            s.scheduler.abort(request_id)

    taken = seconds(abort)
    assert s.scheduler.idle
    return taken


def preempting_half(n: int) -> float:
    s, request = prompt_with_answers(n, 63, num_kv_blocks=n)
    s.scheduler.add(request)
    begin(s)
    s.run()
    taken = seconds(s.run)  # each answer needs a second page
    assert s.cache.stats.preemptions == n // 2
    return taken


@pytest.mark.parametrize("measure", [adding, *full(beginning, aborting), preempting_half])
def test_time_is_linear(measure: Callable[[int], float]) -> None:
    few = min(measure(FEW) for _ in range(3))
    assert any(measure(MANY) < MOST * few for _ in range(3))
