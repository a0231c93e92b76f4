"""Check the GPU and Triton."""

from __future__ import annotations

import re
import warnings
from functools import cache

import torch

HOPPER = 9  # major compute capability

OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""Tested releases: the oldest on GPUs, the later releases in the interpreter."""


@cache
def processors(index: int) -> int:
    """Return a GPU's multiprocessors; for the interpreter (-1), an H100's."""
    return 132 if index < 0 else torch.cuda.get_device_properties(index).multi_processor_count


@cache
def check_hopper(index: int) -> None:
    """Raise ValueError unless the GPU is a Hopper; ROCm also reports 9.x."""
    major, minor = torch.cuda.get_device_capability(index)
    if major != HOPPER or torch.version.hip is not None:
        kind = "ROCm" if torch.version.hip is not None else f"compute capability {major}.{minor}"
        raise ValueError(
            f"cuda:{index} is an {torch.cuda.get_device_name(index)} of {kind}, and the kernels"
            f" are made for {HOPPER}.x, which is Hopper: choose an H100 or H200, or the CPU."
        )


@cache
def check_triton() -> None:
    """Raise ValueError if Triton is missing or too old; warn of a newer Triton than tested."""
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST_TRITON, NEWEST_TRITON))
    change = f"install a torch for CUDA that brings Triton {oldest} to {newest}, or choose the CPU."
    try:
        from triton import __version__ as installed
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        what = "none is installed" if absent else f"the one that is installed cannot be imported ({error})"
        raise ValueError(f"The kernels need Triton, and {what}: {change}") from error
    release = tuple(map(int, re.findall(r"\d+", installed)[:2]))
    untested = f"The kernels were not tested with Triton {installed}, which is installed: {change}"
    if release < OLDEST_TRITON:
        raise ValueError(untested)
    if release > NEWEST_TRITON:
        warnings.warn(untested, stacklevel=2)
