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
from torch.nn.functional import pad

from mambacache.kernels import StateIndices, pack_arrays, place_decodes
from mambacache.plan import PLACEHOLDER, SequenceStep, StepPlan

SHORTEST, LONGEST = 2, 4
"""Of how many last tokens an earlier place is looked for: a longer match goes before a shorter one."""

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
        self._lives: dict[int, int] = {}  # by slot

    def begin(self, plan: StepPlan, indices: StateIndices, known: Known, block_size: int | None) -> Begun:
        """Before a step with decode rows: gives them the tokens that the host does not know, and moves those that are
        late."""
        steps = plan.steps[: plan.num_decodes]
        tokens = indices.tokens[: indices.num_decodes * indices.tokens_per_decode].view(indices.num_decodes, -1)
        self._add([*enumerate(steps)], known, tokens)
        slots = indices.log_slot.long()
        starts = self._lengths[slots] - 1
        late = torch.where(indices.late_len > 0, starts - indices.positions[: tokens.numel() : tokens.shape[1]], 0)
        samples = torch.maximum(indices.decode_len, indices.late_len)
        if any(step.late for step in steps):
            tokens[:, 0] = torch.where(indices.late_len > 0, self._tokens[slots, starts], tokens[:, 0])
            place_decodes(indices, starts, block_size)
        if any(PLACEHOLDER in step.drafts for step in steps):
            longest = max(step.start + step.late for step in steps) + 1
            drafts = follow(self._tokens[slots, :longest], starts, tokens.shape[1] - 1)
            tokens[:, 1:] = torch.where(tokens[:, 1:] == PLACEHOLDER, drafts, tokens[:, 1:])
        return Begun(late, samples.cumsum(0) - samples)

    def _add(self, rows: Sequence[tuple[int, SequenceStep]], known: Known, tokens: Tensor) -> None:
        """Of rows that are the first of their lives all tokens, the last of which is the row's own."""
        new = [(i, step) for i, step in rows if self._lives.get(step.log_slot) != step.life]
        texts = {str(i): np.array(known(step.request_id), np.int32) for i, step in new}
        uploaded = pack_arrays(texts, self._tokens.device) if new else {}
        for i, step in new:
            text = uploaded[str(i)]
            self._tokens[step.log_slot, : len(text)] = text
            self._tokens[step.log_slot, step.start] = tokens[i, 0]
            self._lengths[step.log_slot] = step.start + 1
            self._lives[step.log_slot] = step.life

    def end(self, indices: StateIndices, begun: Begun, sampled: Tensor) -> Tensor:
        """After it, with its tokens, int64 [S], the decode rows' first: keeps what was accepted. Returns int64 [N], how
        many tokens each row gave."""
        width = indices.tokens_per_decode
        tokens = indices.tokens[: indices.num_decodes * width].view(-1, width)
        each = torch.arange(width, device=sampled.device)
        place = begun.first_sample[:, None] + each
        given = sampled[place.clamp(max=len(sampled) - 1)].clamp(min=0).int()
        right = (tokens[:, 1:] == given[:, :-1]) & (each[1:] < indices.decode_len[:, None])
        count = 1 + right.int().cumprod(1).sum(1)
        slots = indices.log_slot.long()
        lengths = self._lengths[slots]
        self._tokens[slots[:, None], lengths[:, None] + each] = given  # beyond the count nobody reads them
        self._lengths[slots] = torch.where(slots > 0, lengths + count, lengths)
        return count


def follow(tokens: Tensor, last: Tensor, count: int) -> Tensor:
    """What followed the last tokens of each row at the latest of the longest matches before that has `count` more, or
    at the earliest of them; zeros where there is no match of `SHORTEST` tokens.

    Shapes: tokens int32 [N, L], last int64 [N] (the index of a row's last token); returns int32 [N, count].
    """
    length = tokens.shape[1]
    end, last = torch.arange(length, device=tokens.device), last[:, None]
    match = end < last
    width = torch.zeros_like(tokens)
    for back in range(LONGEST):
        own = tokens.gather(1, (last - back).clamp(min=0))
        match = match & (pad(tokens, (back, 0), value=-1)[:, :length] == own)
        width += match
    place = torch.where(end + count <= last, 2 * length + end, length - end)
    best, at = torch.where(width < SHORTEST, 0, width * (4 * length) + place).max(dim=1, keepdim=True)
    following = at + 1 + torch.arange(count, device=tokens.device)
    found = tokens.gather(1, following.clamp(max=length - 1))
    return torch.where((best > 0) & (following <= last), found, 0)
