"""Compute decays within a chunk."""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return decays from the start, between tokens [..., to, from], and to the end: sums, since differences lose weak
    decays.
    """
    count = g.shape[-1]
    of_rows = g[..., :, None].expand(*g.shape, count)
    later = torch.ones(count, count, dtype=torch.bool, device=g.device).triu(1)
    between = torch.exp(of_rows.tril(-1).cumsum(-2)).masked_fill(later, 0)
    return torch.exp(g.cumsum(-1)), between, between[..., -1, :]
