"""Define the op that compacts accepted paths of draft trees."""

from __future__ import annotations

import torch
from torch import Tensor

from mambacache.plan import MAX_TOKENS_PER_DECODE

from .backend import backend
from .checks import check_dtype, check_shape
from .state_pool import StatePool


def keep_paths(pool: StatePool, paths: Tensor) -> None:
    """Move `per_token` entries of accepted tokens to where the next step reads them: by depth, without gaps.

    Shapes: paths int32 [R, 9], contiguous: slot or page, first target place, rising source places not before their
    targets, then -1. A slot has one path.
    """
    check_shape("paths", paths, len(paths), 1 + MAX_TOKENS_PER_DECODE)
    check_dtype("paths", paths, torch.int32)
    if paths.device != pool.slabs.device or not paths.is_contiguous():
        raise ValueError(f"paths is on {paths.device}: let it be contiguous, on {pool.slabs.device} as the pool is.")
    if len(paths) and pool.per_token:
        backend(paths).keep_paths(pool, paths)
