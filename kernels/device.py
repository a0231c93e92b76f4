"""What the ops ask of the GPU that runs them: once, and then it is known."""

from __future__ import annotations

from functools import cache

import torch

HOPPER = 9  # its major compute capability


@cache
def processors(index: int) -> int:
    """Multiprocessors of a GPU. Of the CPU, -1, on which Triton's interpreter runs, those of an H100 or H200."""
    return 132 if index < 0 else torch.cuda.get_device_properties(index).multi_processor_count


@cache
def check_hopper(index: int) -> None:
    """Raises ValueError unless a GPU is one that the kernels are made for."""
    major, minor = torch.cuda.get_device_capability(index)
    if major != HOPPER:
        raise ValueError(
            f"cuda:{index} is an {torch.cuda.get_device_name(index)} of compute capability {major}.{minor}, and the"
            f" kernels are made for {HOPPER}.x, which is Hopper: choose an H100 or H200, or the CPU."
        )
