"""One answer that is being generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from mambacache.cache.report import RequestReport
from mambacache.config import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"
    ERROR = "error"  # its step failed when it ran alone


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, how it is to be answered, and the answer so far.

    `completes_stop` is told each answer token but an end token, and says whether the text now holds a stop string.
    """

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    end_tokens: frozenset[int] = frozenset()
    completes_stop: Callable[[int], bool] | None = None
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    report: RequestReport | None = None
    arrival: int = 0  # its place in line
    siblings: list[Request] = field(default_factory=list)  # further answers, to be forked when the prompt is computed

    running: bool = False
    computed: int = 0
    prefill_end: int = 0
    in_flight: int = 0  # tokens that issued steps will give

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens known so far."""
        return len(self.prompt) + len(self.output)

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_end

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Appends sampled tokens up to a stop, which is included; gives those that were appended."""
        taken = []
        for token in tokens:
            taken.append(token)
            self.output.append(token)
            if token in self.end_tokens or (self.completes_stop is not None and self.completes_stop(token)):
                self.finish_reason = FinishReason.STOP
            elif len(self.output) >= self.params.max_tokens:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                break
        return taken
