"""What an engine gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from mambacache.report import RequestReport

Logprobs = dict[int, float]
"""Log probabilities after one position, by token id: the token that stands or was sampled there comes first."""


@dataclass(slots=True)
class Completion:
    """One answer so far. `delta` is the text added since the request's last output; `text` holds all of it.

    `finish_reason` is None while the answer goes on; then "stop", "length", "abort" or "error" (see `error`).
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    delta: str = ""
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[Logprobs] | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's answers so far.

    Attributes:
        time_to_first_token: seconds from submission to the first token; None before it.
        cache: what was reused of the prompt, and why not more; None before the request first ran.
        prompt_logprobs: one entry for each prompt token but the first, if asked for.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    time_to_first_token: float | None = None
    cache: RequestReport | None = None
    prompt_logprobs: list[Logprobs] | None = None

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.outputs)
