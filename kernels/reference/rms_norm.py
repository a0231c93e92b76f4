"""Implement `rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import wide_dtype


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, round_normed: bool, out: Tensor | None = None) -> Tensor:
    """See `mambacache.kernels.rms_norm`. Matches transformers bit for bit."""
    wide = x.to(wide_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_normed:
        y = y.to(x.dtype)
    if weight is not None:
        y = weight * y
    if not round_normed:
        y = y.to(x.dtype)
    return y if out is None else out.copy_(y)
