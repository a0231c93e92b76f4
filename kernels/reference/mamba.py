"""Share step sizes and gates between Mamba1 and Mamba2."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indices import StateIndices
from .elementwise import silu, softplus
from .states import computed_tokens


def step_sizes(dt: Tensor, dt_bias: Tensor | None) -> Tensor:
    return softplus(dt if dt_bias is None else dt + dt_bias.to(dt.dtype))


def gated(
    y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, indices: StateIndices, out: Tensor | None
) -> Tensor:
    """Return (y + D x) silu(z) in x's dtype, zero for padding."""
    if D is not None:
        y += D.to(y.dtype) * x.to(y.dtype)
    if z is not None:
        y *= silu(z.to(y.dtype))
    computed = computed_tokens(indices).view(-1, *[1] * (y.dim() - 1))
    y = torch.where(computed, y, 0).to(x.dtype)
    return y if out is None else out.copy_(y)
