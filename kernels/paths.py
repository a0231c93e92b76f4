"""Define the op that compacts accepted paths of draft trees."""

from __future__ import annotations

import torch
from torch import Tensor

from mambacache.plan import MAX_TOKENS_PER_DECODE

from .backend import backend
from .checks import check_dtype, check_shape
from .state_pool import StatePool


def keep_paths(pool: StatePool, paths: Tensor) -> None:
    """Move entries of accepted tokens to where the next step reads them: by depth, without gaps.

    This covers all `per_token` tensors of `pool`. paths[i, 0] is a slot or page, paths[i, 1] the first target place,
    paths[i, 2:] the source places, then -1. Sources rise, and none precedes its target. Each slot has one path.

    Shapes: paths int32 [R, 9], contiguous.
    """
    check_shape("paths", paths, len(paths), 1 + MAX_TOKENS_PER_DECODE)
    check_dtype("paths", paths, torch.int32)
    if paths.device != pool.slabs.device or not paths.is_contiguous():
        raise ValueError(f"paths is on {paths.device}: let it be contiguous, on {pool.slabs.device} as the pool is.")
    if len(paths) and pool.per_token:
        backend(paths).keep_paths(pool, paths)
