"""Choose the implementation of an op."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .compilation import Zeros, is_compiling
from .device import check_gpu, check_triton


def backend(x: Tensor) -> ModuleType | Zeros:
    """Return the Triton ops for a tensor on a GPU, else (also for float64) the torch ops.

    Raises ValueError for an unsupported GPU or Triton, and unless the GPU is the current device.
    """
    if not x.is_cuda or x.dtype == torch.float64:
        return reference
    index, current = x.get_device(), torch.cuda.current_device()
    check_gpu(index)
    if index != current:
        raise ValueError(
            f"The tensors are on cuda:{index}, but the current device is cuda:{current}: call the op under"
            f" torch.cuda.device({index})."
        )
    check_triton()
    from . import gpu

    return Zeros(gpu) if is_compiling() else gpu
