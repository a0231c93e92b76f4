"""Implement `gated_rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import sigmoid, silu, wide_dtype


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    round_normed: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """See `mambacache.kernels.gated_rms_norm`."""
    dtype = wide_dtype(x)
    factor = (silu if activation == "silu" else sigmoid)(gate.to(dtype))
    normed = x.to(dtype)
    if not norm_before_gate:
        normed = normed * factor
    grouped = normed.unflatten(-1, (-1, group_size or x.shape[-1]))
    normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    normed = weight * normed.to(x.dtype) if round_normed else weight.to(dtype) * normed
    if norm_before_gate:
        normed = normed * factor
    return normed.to(x.dtype) if out is None else out.copy_(normed)
