"""Define the outputs of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from mambacache.report import RequestReport

Logprobs = dict[int, float]
"""Log probabilities by token id; the position's own token comes first."""


@dataclass(slots=True)
class Completion:
    """Hold an answer so far."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    delta: str = ""  # text since the last output
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None before the end
    error: str | None = None
    logprobs: list[Logprobs] | None = None  # by token, if requested
    stop_reason: str | int | None = None  # stop string or token that ended the answer
    num_draft_tokens: int = 0  # verified
    num_accepted_tokens: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum the tokens' log probabilities."""
        return None if self.logprobs is None else sum(next(iter(entry.values())) for entry in self.logprobs)


@dataclass(slots=True)
class RequestMetrics:
    """Hold times in seconds since the epoch; None before the event."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """Hold a request's answers so far."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    metrics: RequestMetrics
    prompt: str | None = None  # text, if given
    time_to_first_token: float | None = None  # in seconds
    cache: RequestReport | None = None  # None before the request first ran
    prompt_logprobs: list[Logprobs | None] | None = None  # by token, if requested; None for the first

    @property
    def num_cached_tokens(self) -> int | None:
        """Count the prompt tokens hit."""
        return None if self.cache is None else self.cache.hit

    @property
    def finished(self) -> bool:
        return None not in [completion.finish_reason for completion in self.outputs]
