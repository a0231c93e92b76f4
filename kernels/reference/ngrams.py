"""Implement the ops of drafts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..indices import StateIndices

SHORTEST, LONGEST = 2, 4
"""Fewest and most last tokens that an earlier place must match: a longer match wins."""

OPEN = -1
"""Marks a draft still to be made."""


def draft_from_history(indices: StateIndices, histories: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `mambacache.kernels.draft_from_history`."""
    tokens, slots = decode_tokens(indices), indices.log_slot.long()
    starts, is_late = lengths[slots] - 1, indices.late_len > 0
    late = torch.where(is_late, starts - indices.positions[: tokens.numel() : tokens.shape[1]], 0)
    samples = torch.maximum(indices.decode_len, indices.late_len)
    tokens[:, 0] = torch.where(is_late, histories[slots, starts], tokens[:, 0])
    if (tokens[:, 1:] == OPEN).any():
        drafts = follow(histories[slots, : int(starts.max()) + 1], starts, tokens.shape[1] - 1)
        tokens[:, 1:] = torch.where(tokens[:, 1:] == OPEN, drafts, tokens[:, 1:])
    return starts, late, samples.cumsum(0) - samples


def add_to_history(
    indices: StateIndices, first_sample: Tensor, sampled: Tensor, histories: Tensor, lengths: Tensor
) -> Tensor:
    """See `mambacache.kernels.add_to_history`."""
    tokens, slots = decode_tokens(indices), indices.log_slot.long()
    each = torch.arange(tokens.shape[1], device=sampled.device)
    place = first_sample[:, None] + each
    given = sampled[place.clamp(max=len(sampled) - 1)].clamp(min=0).int()
    right = (tokens[:, 1:] == given[:, :-1]) & (each[1:] < indices.decode_len[:, None])
    count = 1 + right.int().cumprod(1).sum(1)
    before = lengths[slots]
    histories[slots[:, None], before[:, None] + each] = given
    lengths[slots] = torch.where(slots > 0, before + count, before)
    return count


def decode_tokens(indices: StateIndices) -> Tensor:
    """Return a view [N, T]."""
    rows, width = indices.num_decodes, indices.tokens_per_decode
    return indices.tokens[: rows * width].view(rows, width)


def follow(tokens: Tensor, last: Tensor, count: int) -> Tensor:
    """Return `count` tokens after the best match of each row's tokens up to index `last`."""
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
