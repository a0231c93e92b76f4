"""Runs plans on a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from mambacache.kernels import StatePool
from mambacache.models.adapt import Model
from mambacache.plan import StepPlan
from mambacache.runner.device_batch import DeviceBatch
from mambacache.runner.sampler import RowSampling, sample, score

Logprobs = dict[int, float]
"""Log probabilities of one position: of the token that stands or was sampled there, then of the most likely ones."""

Score = tuple[int, float, list[int], list[float]]
"""A token, its log probability, the most likely tokens, and theirs."""


@dataclass
class RowOutput:
    """What a step gives for one row.

    `tokens` are the sampled ones: none if the row does not sample; for a decode row one after each of its tokens (after
    a draft it means something only if the draft is accepted); else one for each seed; `NOT_FINITE` where the logits are
    no numbers. `logprobs` has one entry for each of them if the request asks for it, `prompt_logprobs` one for each of
    the row's `prompt_targets`.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


class ModelRunner:
    """Executes plans: what they say is read from and written to, nothing else of the pools.

    Args:
        model: whose layers read and write the pools.
        states: the state pool, laid out for the model's `state_layers`.
        pages: the pool of KV pages for the model's `kv_layers`; None if it has none.
    """

    def __init__(self, model: Model, states: StatePool, pages: StatePool | None) -> None:
        self.model = model
        self.states = states
        self.pages = pages

    @torch.inference_mode()
    def execute(self, plan: StepPlan, sampling: Sequence[RowSampling]) -> list[RowOutput]:
        """Runs one step.

        Args:
            plan: the step, of at least one row.
            sampling: for each row of `plan.steps` how it is sampled.

        Returns:
            For each row what it gives.
        """
        with torch.cuda.device_of(self.states.buffer):  # where Triton launches, whatever its arguments lie on
            pages = self.pages.layers if self.pages is not None else []
            for source, target in plan.kv_copies:
                for page in (page for layer in pages for page in layer):
                    page[target] = page[source]
            batch = DeviceBatch.build(plan, sampling, self.states.buffer.device)
            logits = self.model.logits(batch.indices, self.states.layers, pages)
            tokens = sample(logits, batch.sample_index, batch.draw_index, batch.draw_parameters, batch.adjustments)
            scored_at = torch.cat([batch.prompt_index, batch.sample_index[batch.scored_samples]])
            scored = torch.cat([batch.prompt_token, tokens[batch.scored_samples].clamp(min=0)])
            columns = (scored, *score(logits[scored_at], scored, batch.num_top))
            scores = list(zip(*(column.tolist() for column in columns), strict=True))
            return _by_rows(tokens.tolist(), scores, batch, sampling)


def _by_rows(
    tokens: list[int], scores: list[Score], batch: DeviceBatch, sampling: Sequence[RowSampling]
) -> list[RowOutput]:
    """Hands out a step's tokens and scores. Both stand in the order of rows, the scores of prompts before the rest."""
    of_tokens = iter(tokens)
    of_prompts, of_samples = iter(scores[: len(batch.prompt_index)]), iter(scores[len(batch.prompt_index) :])
    return [
        RowOutput(
            list(islice(of_tokens, count)),
            _take(of_samples, count, row.params.logprobs),
            _take(of_prompts, len(row.prompt_targets), row.params.prompt_logprobs),
        )
        for count, row in zip(batch.samples, sampling, strict=True)
    ]


def _take(scores: Iterator[Score], count: int, top: int | None) -> list[Logprobs]:
    """The next `count` scores, each with its `top` most likely tokens; nothing is taken where none are wanted."""
    if top is None:
        return []
    return [
        {token: logprob, **dict(zip(best[:top], best_logprobs[:top], strict=True))}
        for token, logprob, best, best_logprobs in islice(scores, count)
    ]
