"""The op that brings the kept part of a tree of drafts together. It keeps to what `api` says of all ops."""

from __future__ import annotations

import torch
from torch import Tensor

from mambacache.plan import MAX_TOKENS_PER_DECODE

from .backend import backend
from .checks import check_dtype, check_shape
from .state_pool import StatePool


def keep_paths(pool: StatePool, paths: Tensor) -> None:
    """Moves what a pool holds of tokens of trees that were accepted to where the next step looks for it: in the order
    of their depths, without gaps.

    In all tensors of `pool` that are `per_token`, of token logs or of KV pages: paths[i, 0] is a slot or page,
    paths[i, 1] a place in it, and paths[i, 2:] are the places of the tokens that go there and to the places after it,
    then -1 where there are fewer. They rise, and none comes before the place it goes to. Each slot has one path.

    Shapes: paths int32 [R, 9], contiguous.
    """
    check_shape("paths", paths, len(paths), 1 + MAX_TOKENS_PER_DECODE)
    check_dtype("paths", paths, torch.int32)
    if paths.device != pool.slabs.device or not paths.is_contiguous():
        raise ValueError(f"paths is on {paths.device}: let it be contiguous, on {pool.slabs.device} as the pool is.")
    if len(paths) and pool.per_token:
        backend(paths).keep_paths(pool, paths)
