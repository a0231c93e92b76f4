"""Decays between the tokens of a chunk, for recurrences that have one log decay per token and head."""

from __future__ import annotations

import torch
from torch import Tensor

MIN_PAIRWISE_LOG_DECAY = -24.0  # per token; e^-24 is nothing beside 1, and differences of larger sums would cancel


def chunk_decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The decays that follow from log decays g [..., T] of T tokens.

    Returns those from the chunk's start to every token [..., T], from token j to token i [..., T (i), T (j)], 0 for
    j > i, and from every token to the chunk's end [..., T].
    """
    sums = g.clamp(min=MIN_PAIRWISE_LOG_DECAY).cumsum(-1)
    later = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf)
    return torch.exp(g.cumsum(-1)), torch.exp(between), torch.exp(sums[..., -1:] - sums)
