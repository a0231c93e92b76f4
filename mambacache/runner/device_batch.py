"""A step's host arrays on the device, in one transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from mambacache.kernels import StateIndices
from mambacache.plan import PLACEHOLDER, SequenceStep, StepPlan
from mambacache.runner.adjustments import Adjustment, Adjustments, adjustment_arrays
from mambacache.runner.sampler import RowSampling, draw_parameters


@dataclass(frozen=True)
class DeviceBatch:
    """A plan on the device, and what to do with its logits.

    Args:
        indices: the plan's arrays.
        samples: for each row how many tokens it samples.
        unknown, source: int32 [U], offsets in the flat batch of tokens that the host does not know yet, and where they
            stand among those that the step before sampled.
        num_top: most likely tokens wanted where log probabilities are.
        sample_index: int32 [S], the logits after which a token is sampled, row by row.
        draw_index: int32 [R], which of these are drawn at random.
        draw_parameters: int32 [5, R], see `sampler.draw_parameters`.
        prompt_index, prompt_token: int32 [K], the logits from which log probabilities of prompt tokens are taken, row
            by row, and of which tokens.
        scored_samples: int32 [K'], the samples whose log probabilities are wanted.
        adjustments: of the logits before tokens are chosen; None if no row asks for any.
    """

    indices: StateIndices
    samples: tuple[int, ...]
    num_top: int
    unknown: torch.Tensor
    source: torch.Tensor
    sample_index: torch.Tensor
    draw_index: torch.Tensor
    draw_parameters: torch.Tensor
    prompt_index: torch.Tensor
    prompt_token: torch.Tensor
    scored_samples: torch.Tensor
    adjustments: Adjustments | None

    @classmethod
    def build(
        cls,
        plan: StepPlan,
        sampling: Sequence[RowSampling],
        device: torch.device | str,
        places: Mapping[tuple[str, int], int],
    ) -> DeviceBatch:
        """Packs a plan, and how its rows are sampled, into one buffer on the device. `places`, by a request and its
        life, are those of the tokens that the step before sampled."""
        rows = list(zip(plan.steps, sampling, _logits_bounds(plan), strict=True))
        samples = [_samples(step, row, *bounds) for step, row, bounds in rows]
        each = [(row.params, *sample) for row, its in zip(sampling, samples, strict=True) for sample in its]
        adjusted = {i: change for i, (*_, change) in enumerate(each) if change is not None}
        drawn = [i for i, (params, *_) in enumerate(each) if params.temperature > 0]
        prompts = [
            (first + i, token)
            for _, row, (first, _) in rows
            if row.params.prompt_logprobs is not None
            for i, token in enumerate(row.prompt_targets)
        ]
        first_tokens = plan.arrays["tokens"][: plan.num_decodes * plan.tokens_per_decode : plan.tokens_per_decode]
        unknown = np.flatnonzero(first_tokens == PLACEHOLDER).tolist()
        lists = {
            "unknown": [row * plan.tokens_per_decode for row in unknown],
            "source": [places[plan.steps[row].request_id, plan.steps[row].life] for row in unknown],
            "sample_index": [offset for _, offset, *_ in each],
            "draw_index": drawn,
            "prompt_index": [offset for offset, _ in prompts],
            "prompt_token": [token for _, token in prompts],
            "scored_samples": [i for i, (params, *_) in enumerate(each) if params.logprobs is not None],
        }
        arrays = {name: np.array(values, dtype=np.int32) for name, values in lists.items()}
        arrays["draw_parameters"] = draw_parameters(
            [each[i][0] for i in drawn], [each[i][2] for i in drawn], [each[i][3] for i in drawn]
        )
        changes = adjustment_arrays(adjusted, drawn) if adjusted else {}
        indices = StateIndices.from_arrays({**plan.arrays, **arrays, **changes}, device)
        adjustments = Adjustments(*(getattr(indices, name) for name in changes)) if changes else None
        num_top = max(max(row.params.logprobs or 0, row.params.prompt_logprobs or 0) for row in sampling)
        tensors = {name: getattr(indices, name) for name in arrays}
        return cls(indices, tuple(len(its) for its in samples), num_top, **tensors, adjustments=adjustments)


def _logits_bounds(plan: StepPlan) -> list[tuple[int, int]]:
    """For each row its first offset in `logits_index`, and that after its last."""
    decode_starts = np.arange(plan.num_decodes) * plan.tokens_per_decode
    starts = np.concatenate([decode_starts, plan.arrays["query_start_loc"]])
    bounds = np.searchsorted(plan.arrays["logits_index"], starts).tolist()
    return list(pairwise(bounds))


def _samples(
    step: SequenceStep, row: RowSampling, first: int, end: int
) -> list[tuple[int, int, int, Adjustment | None]]:
    """The offset in `logits_index`, the seed, the position and the adjustment of every token that a row samples."""
    if not step.samples:
        return []
    if step.prefill:
        change = row.adjustments[0] if row.adjustments else None
        return [(end - 1, seed, step.start + step.num_tokens, change) for seed in row.seeds]
    return [
        (first + i, row.seeds[0], step.start + i + 1, row.adjustments[i] if row.adjustments else None)
        for i in range(step.num_tokens)
    ]
