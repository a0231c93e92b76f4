"""Which implementation of an op serves a tensor."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import reference


def backend(x: Tensor) -> ModuleType:
    """The ops in Triton for a tensor on a GPU, otherwise those in plain torch, which alone know float64.

    Triton is imported with the first op on a GPU.
    """
    if not x.is_cuda or x.dtype == torch.float64:
        return reference
    from . import gpu

    return gpu
