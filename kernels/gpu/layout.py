"""What kernels need of the layout of tensors, and what they may assume of addresses."""

from __future__ import annotations

import math

from torch import Tensor


def check_dense(**tensors: Tensor | None) -> None:
    """Raises ValueError unless elements of the last dim lie side by side."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"The last dim of {name} has stride {tensor.stride(-1)}: make it dense, of stride 1.")


def stride_alignment(tensor: Tensor) -> int:
    """Elements, up to 16 bytes, of which every stride but that of the last dim is a multiple.

    It depends on a layer's layout, never on a batch. (Of the address itself Triton keeps account.)
    """
    return math.gcd(16 // tensor.element_size(), *tensor.stride()[:-1])
