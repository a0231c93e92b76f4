"""Check that `Scheduler` refuses requests that could never run, and that running requests go on."""

from __future__ import annotations

from typing import Any

import pytest

from mambacache.config import SamplingParams
from mambacache.scheduler.request import Request
from mambacache.scheduler.scheduler import Scheduler
from symbolic import text
from watched_cache import all_free, view, watched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0: set it to 1 or more"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: set it to 1 or more"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1: set it to 0 or more"),
    ],
)
def test_limits_that_let_nothing_run_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scheduler(watched(), **{"max_num_batched_tokens": 1, "max_num_seqs": 1, **options})


@pytest.mark.parametrize("n", [0, -1, 16_385, 10**9])
def test_the_number_of_answers_is_bounded(n: int) -> None:
    with pytest.raises(ValueError, match=f"n is {n}: set it between 1 and 16,384"):
        SamplingParams(n=n)
    assert SamplingParams(n=16_384).n == 16_384


@pytest.mark.parametrize(
    ("prompt", "siblings", "params", "message"),
    [
        (text(10), ["running"], {}, "request id 'running' is in use: choose another"),
        (text(10), ["b", "sibling"], {}, "request id 'sibling' is in use: choose another"),
        (text(10), ["a"], {}, "request id 'a' is in use: choose another"),
        (text(10), ["b", "b"], {}, "request id 'b' is in use: choose another"),
        (
            text(1000),
            [],
            {"max_tokens": 26},
            "the prompt has 1000 tokens and max_tokens is 26, and the KV pool holds 1024",
        ),
        ([], [], {}, "request 'a' has an empty prompt: give it at least one token"),
        (b"bytes", [], {}, "the prompt of request 'a' is of type bytes"),
        ([1, -1], [], {}, "the prompt of request 'a' holds what is no token id"),
    ],
)
def test_bad_requests_are_refused(prompt: Any, siblings: list[str], params: dict[str, Any], message: str) -> None:
    cache = watched()
    scheduler = Scheduler(cache, max_num_batched_tokens=100, max_num_seqs=4)
    running = Request("running", text(10, 1), SamplingParams(n=2))
    running.siblings = [sibling := Request("sibling", running.prompt, running.params)]
    scheduler.add(running)
    step = scheduler.schedule()
    assert step is not None
    scheduler.issued(step)
    request = Request("a", prompt, SamplingParams(**params))
    request.siblings = [Request(name, prompt, request.params) for name in siblings]
    before = view(cache)
    with pytest.raises(ValueError, match=message):
        scheduler.add(request)
    assert view(cache) == before and set(scheduler.requests) == {"running", "sibling"}
    assert scheduler.update(step, [[1, 2]]) == [running, sibling]
    step = scheduler.schedule()
    assert step is not None and [row.request_id for row in step.steps] == ["running", "sibling"]
    for name in ("running", "sibling"):
        scheduler.abort(name)
    scheduler.failed(step, None)
    assert scheduler.idle
    all_free(cache)
