"""Describe a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mambacache.config import SamplingParams
from mambacache.plan import SequenceStep
from mambacache.report import RequestReport


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # a failed step, bad logits, or `completes_stop` raised


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """Holds a prompt and the answer so far."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    end_tokens: frozenset[int] = frozenset()
    completes_stop: Callable[[int, int], bool] | None = None  # takes position, which may repeat, and token
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    report: RequestReport | None = None
    arrival: int = 0
    siblings: list[Request] = field(default_factory=list)  # further answers
    waiting: bool = False  # in line or parked
    passed_at: int | None = None  # admissions before it was parked
    wrong_from: int | None = None  # see `PrefixCache.free`
    drafted: int = 0
    late: bool = False  # its last row's start was unknown
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def until_stop(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Return tokens through a stop, and the finish reason."""
        taken: list[int] = []
        for position, token in enumerate(tokens, len(self.output)):
            taken.append(token)
            if token in self.end_tokens or (self.completes_stop is not None and self.completes_stop(position, token)):
                return taken, FinishReason.STOP
            if position + 1 >= self.params.max_tokens:
                return taken, FinishReason.LENGTH
        return taken, None

    def fail_numerically(self, step: SequenceStep, sound: int) -> None:
        """End the answer after `sound` tokens of a row."""
        self.wrong_from = 0 if step.prefill else step.start
        known = len(self.prompt) + len(self.output) + sound
        self.error = (
            f"the model's logits after {known} tokens are NaN or infinite: use another dtype, as float32, or check the "
            "weights"
        )
        self.finish_reason = FinishReason.ERROR  # last, in case of an exception

    def fail(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {error}"
        self.finish_reason = FinishReason.ERROR
