"""Which implementation of an op serves a tensor."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .compilation import Zeros, is_compiling
from .device import check_hopper, check_triton


def backend(x: Tensor) -> ModuleType | Zeros:
    """The ops in Triton for a tensor on a GPU, otherwise those in plain torch, which alone know float64.

    Triton is imported with the first op on a GPU. It launches on the current device, whatever its arguments lie on.

    Raises:
        ValueError: the kernels are not made for that GPU or the Triton that is installed, or the GPU is not the current
            device.
    """
    if not x.is_cuda or x.dtype == torch.float64:
        return reference
    index, current = x.get_device(), torch.cuda.current_device()
    check_hopper(index)
    if index != current:
        raise ValueError(
            f"The tensors are on cuda:{index}, but the current device is cuda:{current}: call the op under"
            f" torch.cuda.device({index})."
        )
    check_triton()
    from . import gpu

    return Zeros(gpu) if is_compiling() else gpu
