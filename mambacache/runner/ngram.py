"""Drafts made on the device, of each request's own tokens: what followed its last ones where they stood before.

Good where answers repeat parts of their prompts, as quotations, edits or code do. The host plans a step before the
tokens of the one before it are read: it knows neither these drafts nor, after some, where a row begins. Both are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mambacache.kernels import StateIndices, add_to_history, draft_from_history, pack_arrays, place_decodes
from mambacache.plan import SequenceStep, StepPlan

Known = Callable[[str], Sequence[int]]
"""The tokens of a request that the host knows."""


def history_bytes(slots: int, max_model_len: int, max_draft_tokens: int) -> int:
    """What `Histories` takes."""
    return 4 * (slots + 1) * _room(max_model_len, max_draft_tokens)


def _room(max_model_len: int, max_draft_tokens: int) -> int:
    """Of a request's tokens: its last row, and one that is launched in vain behind that, go beyond its end."""
    return max_model_len + 3 * (max_draft_tokens + 1)


class Begun(NamedTuple):
    """Of each decode row, int64 [N]: by how many tokens it is late, and where its samples begin."""

    late: Tensor
    first_sample: Tensor


class Histories:
    """The tokens of all running requests as the steps that were launched leave them, by the slot of their log.

    Args:
        slots: of token logs.
        max_model_len: tokens of a request.
        max_draft_tokens: of a row.
    """

    def __init__(self, slots: int, max_model_len: int, max_draft_tokens: int, device: torch.device | str) -> None:
        room = _room(max_model_len, max_draft_tokens)
        self._tokens = torch.zeros(slots + 1, room, dtype=torch.int32, device=device)
        self._lengths = torch.ones(slots + 1, dtype=torch.int64, device=device)  # of the null slot always 1
        self._residencies: dict[int, int] = {}  # by slot

    def forget(self) -> None:
        """Drop all histories."""
        self._lengths.fill_(1)
        self._residencies.clear()

    def begin(self, plan: StepPlan, indices: StateIndices, known: Known, block_size: int | None) -> Begun:
        """Before a step with decode rows: gives them the tokens that the host does not know, and moves those that are
        late."""
        steps = plan.steps[: plan.num_decodes]
        self._add([*enumerate(steps)], known, indices)
        starts, late, first_sample = draft_from_history(indices, self._tokens, self._lengths)
        if any(step.late for step in steps):
            place_decodes(indices, starts, block_size)
        return Begun(late, first_sample)

    def _add(self, rows: Sequence[tuple[int, SequenceStep]], known: Known, indices: StateIndices) -> None:
        """Of rows that are the first of their lives all tokens, the last of which is the row's own."""
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
        """After it, with its tokens, int64 [S], the decode rows' first: keeps what was accepted. Returns int64 [N], how
        many tokens each row gave."""
        return add_to_history(indices, begun.first_sample, sampled, self._tokens, self._lengths)
