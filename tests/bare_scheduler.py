"""Answer an engine's calls as scheduler and runner in one, without a cache or a model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from types import SimpleNamespace
from typing import Any

from mambacache.runner.model_runner import RowOutput
from mambacache.scheduler.request import FinishReason, Request

LENGTH = 4
"""Tokens of the answers that the tests ask for."""


class Line:
    """A row for each request in each step. The tokens of an answer are 10, 11, 12 and so on, and the log probability of
    each is the negative number of its step.

    Attributes:
        told: the outcomes of steps in order, each with its plan; "because of" with the error comes after "failed".
        stuck: whether nothing can run.
        ahead: how many steps may be under way beside the one that is planned.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self.cache = SimpleNamespace(tokens=None)  # only a runner asks for them
        self.requests: dict[str, Request] = {}
        self.told: list[tuple[str, Any]] = []
        self.stuck = False
        self.numbers = count()
        self.under_way: list[Any] = []  # oldest first

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            request.finish_reason = FinishReason.ABORT

    def schedule(self) -> Any:
        assert len(self.under_way) <= self.ahead, "the step before was neither taken nor failed"
        row = {"start": 0, "num_tokens": 1, "prefill": False, "prompt_logits": False, "samples": False, "drafts": ()}
        steps = tuple(SimpleNamespace(request_id=request_id, **row) for request_id in self.requests)
        if not steps or self.stuck:
            return None
        self.under_way.append(SimpleNamespace(steps=steps, number=next(self.numbers)))
        return self.under_way[-1]

    def launch(self, plan: Any, sampling: list[Any], unread: Any, known: None) -> Any:
        assert len(sampling) == len(plan.steps)
        assert (unread is None) == (plan is self.under_way[0])
        return SimpleNamespace(read=lambda: self.read(plan))

    def read(self, plan: Any) -> list[RowOutput]:
        assert plan is self.under_way[0]
        lengths = [len(request.output) if request is not None else LENGTH for request in self.ran(plan)]
        return [RowOutput([10 + length], [{10 + length: -plan.number}]) for length in lengths]

    def ran(self, plan: Any) -> list[Request | None]:
        """Return the request of each row of a step, or None for a request that has ended."""
        return [self.requests.get(step.request_id) for step in plan.steps]

    def issued(self, plan: Any) -> None:
        self.told.append(("issued", plan))

    def update(self, plan: Any, sampled: Iterable[list[int]]) -> list[Request]:
        """Take all of the step's tokens, or none if a callback is interrupted."""
        rows = [pair for pair in zip(self.ran(plan), sampled, strict=True) if pair[0] is not None]
        ran = [request for request, _ in rows]
        known = [len(request.output) for request in ran]
        try:
            for request, tokens in rows:
                taken, request.finish_reason = request.until_stop(tokens)
                request.output += taken
        except BaseException:
            for request, length in zip(ran, known, strict=True):
                del request.output[length:]
                request.finish_reason = None
            raise
        self.told.append(("updated" if ran else "in vain", plan))
        self.under_way.remove(plan)
        for request in ran:
            if request.finish_reason is not None:
                del self.requests[request.request_id]
        return ran

    def failed(self, plan: Any, error: BaseException) -> list[Request]:
        """Forget a step that is under way, and take back no tokens."""
        self.under_way = [each for each in self.under_way if each is not plan]
        self.told += [("failed", plan), ("because of", error)]
        return []
