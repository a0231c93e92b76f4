"""Implement `keep_paths`."""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..state_pool import StatePool
from .common.launch import NO_POINTERS, Launcher

BLOCK = 1024  # words moved at once
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=["stride", "parts"])
def _keep_paths_kernel(slabs, paths, table, stride, parts, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    """Move a tensor of a path. A thread moves the same words of all places, so their order holds."""
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    paths += row * (2 + PLACES)
    slot, first = tl.load(paths).to(tl.int64), tl.load(paths + 1)
    offset, size = tl.load(table + 2 * part), tl.load(table + 2 * part + 1)
    slabs += slot * stride + offset
    for start in range(0, size, BLOCK):
        word = start + tl.arange(0, BLOCK)
        for i in range(PLACES):
            place = tl.load(paths + 2 + i)
            mask = (word < size) & (place >= 0)
            value = tl.load(slabs + place.to(tl.int64) * size + word, mask=mask)
            tl.store(slabs + (first + i).to(tl.int64) * size + word, value, mask=mask)


_launch = Launcher(_keep_paths_kernel)


@lru_cache(maxsize=64)
def _table(per_token: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[int, Tensor]:
    """Return bytes per word, offsets and entry sizes."""
    word = gcd(4, *(size for _, _, size in per_token))
    places = [[offset // word, size // word] for offset, _, size in per_token]
    return word, torch.tensor(places, dtype=torch.int64, device=device)


def keep_paths(pool: StatePool, paths: Tensor) -> None:
    """See `mambacache.kernels.keep_paths`."""
    word, table = _table(pool.per_token, paths.device)
    slabs = pool.slabs.view(WORDS[word])
    _launch(
        len(paths) * len(table),
        (slabs, paths, table),
        NO_POINTERS,
        (slabs.stride(0), len(table)),
        {"PLACES": paths.shape[1] - 2, "BLOCK": BLOCK},
        num_warps=4,
    )
