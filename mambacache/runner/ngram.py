"""Draft the tokens behind an earlier copy of a request's last tokens, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mambacache.kernels import StateIndices, add_to_history, draft_from_history, pack_arrays, place_decodes
from mambacache.plan import SequenceStep, StepPlan

Known = Callable[[str], Sequence[int]]


def history_bytes(slots: int, max_model_len: int, max_draft_tokens: int) -> int:
    return 4 * (slots + 1) * _room(max_model_len, max_draft_tokens)


def _room(max_model_len: int, max_draft_tokens: int) -> int:
    """Return a request's capacity; two rows may go beyond `max_model_len`."""
    return max_model_len + 3 * (max_draft_tokens + 1)


class Begun(NamedTuple):
    """Holds decode rows' lateness in tokens and first samples, int64 [N]."""

    late: Tensor
    first_sample: Tensor


class Histories:
    """Holds tokens of running requests by log slot."""

    def __init__(self, slots: int, max_model_len: int, max_draft_tokens: int, device: torch.device | str) -> None:
        room = _room(max_model_len, max_draft_tokens)
        self._tokens = torch.zeros(slots + 1, room, dtype=torch.int32, device=device)
        self._lengths = torch.ones(slots + 1, dtype=torch.int64, device=device)  # 1 for the null slot
        self._residencies: dict[int, int] = {}

    def forget(self) -> None:
        self._lengths.fill_(1)
        self._residencies.clear()

    def begin(self, plan: StepPlan, indices: StateIndices, known: Known, block_size: int | None) -> Begun:
        """Fill in drafts, and move late rows."""
        steps = plan.steps[: plan.num_decodes]
        self._add([*enumerate(steps)], known, indices)
        starts, late, first_sample = draft_from_history(indices, self._tokens, self._lengths)
        if any(step.unplaced_by for step in steps):
            place_decodes(indices, starts, block_size)
        return Begun(late, first_sample)

    def _add(self, rows: Sequence[tuple[int, SequenceStep]], known: Known, indices: StateIndices) -> None:
        new = [(i, step) for i, step in rows if self._residencies.get(step.log_slot) != step.residency]
        texts = {str(i): np.array(known(step.request_id), np.int32) for i, step in new}
        uploaded = pack_arrays(texts, self._tokens.device) if new else {}
        for i, step in new:
            text = uploaded[str(i)]
            self._tokens[step.log_slot, : len(text)] = text
            self._tokens[step.log_slot, step.start] = indices.tokens[i * indices.tokens_per_decode]
            self._lengths[step.log_slot] = step.start + 1
            self._residencies[step.log_slot] = step.residency

    def end(self, indices: StateIndices, begun: Begun, sampled: Tensor) -> Tensor:
        """Append accepted samples, int64 [S]; count valid samples, int64 [N]."""
        return add_to_history(indices, begun.first_sample, sampled, self._tokens, self._lengths)
