"""Copy a step's arrays to the device at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from mambacache.config import SamplingParams
from mambacache.kernels import StateIndices
from mambacache.plan import PLACEHOLDER, SequenceStep, StepPlan
from mambacache.runner.adjustments import Adjustment, Adjustments, adjustment_arrays
from mambacache.runner.sampler import RowSampling, draw_groups, draw_parameters, ordered, random_bits


class Draw(NamedTuple):
    sample: int
    params: SamplingParams
    seed: int
    position: int
    row: int


@dataclass(frozen=True)
class DeviceBatch:
    """Holds a plan and its sampling on the device, int32."""

    indices: StateIndices
    samples: tuple[int, ...]  # by row
    num_top: int
    unknown: torch.Tensor  # [U], flat offsets of tokens that the host lacks
    source: torch.Tensor  # [U], their indices in the last step's samples
    sample_index: torch.Tensor  # [S], logits to sample from
    draw_index: torch.Tensor  # [R], samples drawn at random
    draw_parameters: torch.Tensor  # [5, R]
    draw_groups: list[tuple[int, int]]
    late_bits: torch.Tensor | None  # [R, 8], random bits for a row late by 0 to 7 tokens
    draw_row: torch.Tensor | None  # [R], row of each draw, N for prefill
    prompt_index: torch.Tensor  # [K], logits that score prompt tokens
    prompt_token: torch.Tensor  # [K]
    scored_samples: torch.Tensor  # [K']
    adjustments: Adjustments | None

    @classmethod
    def build(
        cls,
        plan: StepPlan,
        sampling: Sequence[RowSampling],
        device: torch.device | str,
        places: Mapping[int, int],
    ) -> DeviceBatch:
        """Pack all into one buffer; `places` holds first samples of the last step by residency."""
        samples: list[int] = []
        offsets: list[int] = []
        draws: list[Draw] = []
        adjusted: dict[int, Adjustment] = {}
        scored: list[int] = []
        prompts: list[tuple[int, int]] = []
        num_top = 0
        late, num_rows = any([step.unplaced_by for step in plan.steps]), len(plan.arrays["decode_src"])
        for i, (step, row, (first, end)) in enumerate(zip(plan.steps, sampling, _logits_bounds(plan), strict=True)):
            place = len(offsets)
            if step.samples:
                offsets += [end - 1] * len(row.seeds) if step.prefill else range(first, first + step.num_tokens)
            samples.append(len(offsets) - place)
            if row.plain:
                continue
            params, places_here = row.params, range(place, len(offsets))
            if params.temperature > 0 and step.samples:
                draws += _draws(step, row, places_here, i if i < plan.num_decodes else num_rows)
            if row.adjustments:
                adjusted |= {i: row.adjustments[0 if step.prefill else i - place] for i in places_here}
            if params.logprobs is not None:
                scored += places_here
                num_top = max(num_top, params.logprobs)
            if params.prompt_logprobs is not None:
                prompts += enumerate(row.prompt_targets, first)
                num_top = max(num_top, params.prompt_logprobs)
        draws.sort(key=lambda draw: ordered(draw.params))  # for `draw_groups`
        first_tokens = plan.arrays["tokens"][: plan.num_decodes * plan.tokens_per_decode : plan.tokens_per_decode]
        unknown = [
            row for row in np.flatnonzero(first_tokens == PLACEHOLDER).tolist() if not plan.steps[row].unplaced_by
        ]
        lists = {
            "unknown": [row * plan.tokens_per_decode for row in unknown],
            "source": [places[plan.steps[row].residency] for row in unknown],
            "sample_index": offsets,
            "draw_index": [draw.sample for draw in draws],
            "prompt_index": [offset for offset, _ in prompts],
            "prompt_token": [token for _, token in prompts],
            "scored_samples": scored,
        }
        arrays = {name: np.array(values, dtype=np.int32) for name, values in lists.items()}
        asked = [draw.params for draw in draws]
        arrays["draw_parameters"] = draw_parameters(
            asked, [draw.seed for draw in draws], [draw.position for draw in draws]
        )
        if late and draws:
            bits = [random_bits([draw.seed] * 8, range(draw.position, draw.position + 8)) for draw in draws]
            arrays |= {"late_bits": np.stack(bits), "draw_row": np.array([draw.row for draw in draws], np.int32)}
        changes = adjustment_arrays(adjusted, lists["draw_index"]) if adjusted else {}
        indices = StateIndices.from_arrays({**plan.arrays, **arrays, **changes}, device)
        adjustments = Adjustments(*(getattr(indices, name) for name in changes)) if changes else None
        tensors = {"late_bits": None, "draw_row": None} | {name: getattr(indices, name) for name in arrays}
        groups = draw_groups(asked)
        return cls(indices, tuple(samples), num_top, draw_groups=groups, **tensors, adjustments=adjustments)

    def draw_late(self, late: torch.Tensor) -> None:
        """Select the random bits for rows late by `late` tokens, int64 [N]."""
        if self.late_bits is not None and self.draw_row is not None:
            by = torch.cat([late, late.new_zeros(1)])[self.draw_row]
            self.draw_parameters[4] = self.late_bits.gather(1, by[:, None])[:, 0]


def _logits_bounds(plan: StepPlan) -> list[tuple[int, int]]:
    decode_starts = np.arange(plan.num_decodes) * plan.tokens_per_decode
    starts = np.concatenate([decode_starts, plan.arrays["query_start_loc"]])
    bounds = np.searchsorted(plan.arrays["logits_index"], starts).tolist()
    return list(pairwise(bounds))


def _draws(step: SequenceStep, sampling: RowSampling, samples: Sequence[int], row: int) -> list[Draw]:
    params, seeds, end = sampling.params, sampling.seeds, step.start + step.num_tokens
    if step.prefill:
        return [Draw(sample, params, seed, end, row) for sample, seed in zip(samples, seeds, strict=True)]
    positions = (step.start + depth + 1 for depth in step.depths())
    return [Draw(sample, params, seeds[0], position, row) for sample, position in zip(samples, positions, strict=True)]
