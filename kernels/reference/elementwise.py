"""Elementwise functions whose result does not depend on an element's place in a tensor.

torch's sigmoid, silu and softplus use vector code for most of a tensor and scalar code for its tail, which differ in
the last bit; exp, log1p, sums, quotients and roots do not. Bitwise claims need the latter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
