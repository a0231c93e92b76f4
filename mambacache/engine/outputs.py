"""Define the outputs of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from mambacache.report import RequestReport

Logprobs = dict[int, float]
"""Log probabilities at a position, by token id; the position's own token comes first."""


@dataclass(slots=True)
class Completion:
    """Hold an answer so far.

    Attributes:
        delta: text added since the last output.
        finish_reason: "stop", "length", "abort" or "error"; None before the end.
        stop_reason: the stop string or token that ended the answer.
        logprobs: an entry for each token, if requested.
        num_draft_tokens: verified draft tokens.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    delta: str = ""
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[Logprobs] | None = None
    stop_reason: str | int | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum of the tokens' log probabilities."""
        return None if self.logprobs is None else sum(next(iter(entry.values())) for entry in self.logprobs)


@dataclass(slots=True)
class RequestMetrics:
    """Hold times in seconds since the epoch; None before the event."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """Hold a request's answers so far.

    Attributes:
        prompt: the text, if given.
        time_to_first_token: seconds from submission.
        cache: the prefix hit and the losses; None before the request first ran.
        prompt_logprobs: an entry for each prompt token, if requested; None for the first.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    metrics: RequestMetrics
    prompt: str | None = None
    time_to_first_token: float | None = None
    cache: RequestReport | None = None
    prompt_logprobs: list[Logprobs | None] | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Return the prompt tokens of the prefix hit."""
        return None if self.cache is None else self.cache.hit

    @property
    def finished(self) -> bool:
        return None not in [completion.finish_reason for completion in self.outputs]
