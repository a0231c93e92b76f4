"""Decays between the tokens of a chunk, for recurrences that have one log decay per token and head."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The decays that follow from log decays g [..., T] of T tokens.

    Returns those from the chunk's start to every token [..., T], from token j to token i [..., T (i), T (j)], 0 for
    j > i, and from every token to the chunk's end [..., T].

    Every pair has a sum of its own: differences of one running sum would lose what a strong decay leaves of a weak one.
    """
    count = g.shape[-1]
    of_rows = g[..., :, None].expand(*g.shape, count)
    later = torch.ones(count, count, dtype=torch.bool, device=g.device).triu(1)
    between = torch.exp(of_rows.tril(-1).cumsum(-2)).masked_fill(later, 0)
    return torch.exp(g.cumsum(-1)), between, between[..., -1, :]
