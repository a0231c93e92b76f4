"""Check the GPU and Triton."""

from __future__ import annotations

import os
import re
import warnings
from functools import cache
from typing import Literal, NamedTuple

import torch

HOPPER = (9, 0)  # compute capability
OLDEST_GPU = (8, 0)
LARGE_TILES = 163 * 1024  # bytes of shared memory that they may take


class Gpu(NamedTuple):
    names: str
    shared_memory: int  # KiB per block
    proof: Literal["run", "emulated", "compiled"]
    """The GPU tests ran on it, a Hopper ran some of them with its code, or kernels were compiled for it."""


GPUS = {
    (8, 0): Gpu("A100, A30", 163, "emulated"),
    (8, 6): Gpu("A10, A40, RTX 3090", 99, "emulated"),
    (8, 9): Gpu("L4, L40S, RTX 4090", 99, "emulated"),
    HOPPER: Gpu("H100, H200", 227, "run"),
    (10, 0): Gpu("B200, GB200", 227, "compiled"),
    (10, 3): Gpu("B300, GB300", 227, "compiled"),
    (12, 0): Gpu("RTX 5090, RTX PRO 6000", 99, "compiled"),
    (12, 1): Gpu("DGX Spark", 99, "compiled"),
}
"""This maps compute capabilities to GPUs."""

OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""Tested releases: the oldest on GPUs, the later releases in the interpreter."""


@cache
def processors(index: int) -> int:
    """Return a GPU's multiprocessors; for the interpreter (-1), an H100's."""
    return 132 if index < 0 else torch.cuda.get_device_properties(index).multi_processor_count


@cache
def capability_of(index: int) -> tuple[int, int]:
    """Return a GPU's compute capability; for the interpreter (-1), Hopper's.

    MAMBACACHE_GPU, sm80 for instance, names a capability instead, so that tests on a Hopper run its kernels.
    """
    names = {f"sm{major}{minor}": (major, minor) for major, minor in GPUS}
    wanted = os.environ.get("MAMBACACHE_GPU", "")
    if wanted:
        if wanted not in names:
            raise ValueError(f"MAMBACACHE_GPU is {wanted!r}: set it to one of {', '.join(names)}, or unset it.")
        return names[wanted]
    return HOPPER if index < 0 else torch.cuda.get_device_capability(index)


def is_hopper(index: int) -> bool:
    """Return whether a GPU runs the kernels in Gluon."""
    return capability_of(index)[0] == HOPPER[0]


def overlaps_launches(index: int) -> bool:
    """Return whether a GPU can begin a launch before the previous launch ends."""
    return capability_of(index) >= HOPPER


@cache
def shared_memory(index: int) -> int:
    """Return the most bytes of shared memory that a block may have."""
    known = GPUS.get(capability_of(index))
    if known:
        return known.shared_memory * 1024
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin  # type: ignore[attr-defined]


def takes_large_tiles(index: int) -> bool:
    """Return whether a block has at least an A100's shared memory."""
    return shared_memory(index) >= LARGE_TILES


@cache
def check_gpu(index: int) -> None:
    """Raise ValueError for a GPU older than Ampere or of AMD; warn of a GPU for which no kernel was compiled."""
    capability = capability_of(index)
    version, oldest = (f"{major}.{minor}" for major, minor in (capability, OLDEST_GPU))
    rocm = torch.version.hip is not None
    if capability < OLDEST_GPU or rocm:
        kind = "ROCm" if rocm else f"compute capability {version}"
        raise ValueError(
            f"cuda:{index} is an {torch.cuda.get_device_name(index)} of {kind}, and the kernels are made for NVIDIA"
            f" GPUs of compute capability {oldest} and later: choose such a GPU, or the CPU."
        )
    if capability not in GPUS:
        name = torch.cuda.get_device_name(index)
        warnings.warn(
            f"The kernels were not tested for compute capability {version}, which cuda:{index} ({name}) has.",
            stacklevel=2,
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
