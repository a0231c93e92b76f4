"""What an engine gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from mambacache.report import RequestReport

Logprobs = dict[int, float]
"""Log probabilities after one position, by token id: the token that stands or was sampled there comes first."""


@dataclass(slots=True)
class Completion:
    """One answer so far. `delta` is the text added since the request's last output; `text` holds all of it.

    Attributes:
        finish_reason: None while the answer goes on; then "stop", "length", "abort" or "error" (see `error`).
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended it; None for the model's own end
            tokens and for other reasons.
        logprobs: one entry for each token, if asked for.
        num_draft_tokens: guesses that were verified with other tokens of the answer, in the same steps.
        num_accepted_tokens: those that were right.
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
        """The sum of the tokens' log probabilities; None unless they were asked for."""
        return None if self.logprobs is None else sum(next(iter(entry.values())) for entry in self.logprobs)


@dataclass(slots=True)
class RequestMetrics:
    """When it happened, in seconds since the epoch; None for what has not."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's answers so far.

    Attributes:
        prompt: its text, if that was given.
        time_to_first_token: seconds from submission to the first token; None before it.
        cache: what was reused of the prompt, and why not more; None before the request first ran.
        prompt_logprobs: one entry for each prompt token, if asked for; None for the first, before which nothing stands.
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
        """Prompt tokens that were not computed; None before the request first ran."""
        return None if self.cache is None else self.cache.hit

    @property
    def finished(self) -> bool:
        return None not in [completion.finish_reason for completion in self.outputs]
