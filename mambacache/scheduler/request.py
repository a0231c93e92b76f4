"""One answer that is being generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mambacache.config import SamplingParams
from mambacache.plan import SequenceStep
from mambacache.report import RequestReport


class FinishReason(StrEnum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"
    ERROR = "error"  # its step failed when it ran alone, its logits were not finite, or its tokens could not be taken


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """A prompt, how it is to be answered, and the answer so far. How far it is computed, the cache knows.

    `completes_stop(position, token)` is told each answer token but an end token, and says whether the text now holds a
    stop string. After a failed step it may be told the same positions again.
    """

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    end_tokens: frozenset[int] = frozenset()
    completes_stop: Callable[[int, int], bool] | None = None
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    report: RequestReport | None = None
    arrival: int = 0  # its place in line
    siblings: list[Request] = field(default_factory=list)  # further answers, to be forked when the prompt is computed
    waiting: bool = False  # in line, or set aside
    passed_at: int | None = None  # how many admissions there had been when another one was first let ahead of it
    wrong_from: int | None = None  # after so many tokens its logits were not finite
    drafted: int = 0  # drafts of its last row
    late: bool = False  # whether its last row, when it was planned, had an unknown start
    num_draft_tokens: int = 0  # that were verified
    num_accepted_tokens: int = 0  # that were right

    def until_stop(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Sampled tokens up to a stop, which is included, and why the answer ends there, if it does; takes nothing."""
        taken: list[int] = []
        for position, token in enumerate(tokens, len(self.output)):
            taken.append(token)
            if token in self.end_tokens or (self.completes_stop is not None and self.completes_stop(position, token)):
                return taken, FinishReason.STOP
            if position + 1 >= self.params.max_tokens:
                return taken, FinishReason.LENGTH
        return taken, None

    def fail_numerically(self, step: SequenceStep, sound: int) -> None:
        """The answer ends: the logits of a row, after the first `sound` tokens that it gave, were not finite. Before a
        decode row they were: its start is sound."""
        self.wrong_from = 0 if step.prefill else step.start
        known = len(self.prompt) + len(self.output) + sound
        self.error = (
            f"the model's logits after {known} tokens are NaN or infinite: use another dtype, as float32, or check the "
            "weights"
        )
        self.finish_reason = FinishReason.ERROR  # last: an exception before leaves a request that runs on

    def fail(self, error: Exception) -> None:
        """End the answer with an error."""
        self.error = f"{type(error).__name__}: {error}"
        self.finish_reason = FinishReason.ERROR
