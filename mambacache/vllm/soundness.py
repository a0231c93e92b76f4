"""Test blocks for NaN on behalf of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mambacache.kernels.state_pool import BLOCKS_AT_ONCE, StatePool

FLOAT8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes of KV held as bytes, by `--kv-cache-dtype`."""


class Question(NamedTuple):
    """Names the states and KV pages to test."""

    states: tuple[int, ...]
    pages: tuple[int, ...]


class Answer(NamedTuple):
    """Tells which states are finite, and which pages bad."""

    states: list[bool]
    bad_pages: list[int]


def answer(question: Question, pool: StatePool, caches: Sequence[Tensor], cache_config: Any) -> Answer:
    """Test blocks on all ranks; one of the first two dimensions of `caches` counts pages."""
    views = [_by_page(cache, cache_config) for cache in caches]
    pages = finite_pages([view for view in views if view is not None], question.pages)
    sound = _on_every_rank([*pool.finite(question.states), *pages])
    states, sound_pages = sound[: len(question.states)], sound[len(question.states) :]
    return Answer(states, [page for page, is_sound in zip(question.pages, sound_pages, strict=True) if not is_sound])


def _by_page(cache: Tensor, cache_config: Any) -> Tensor | None:
    """Return a view with pages first, if possible."""
    if not cache.is_floating_point():
        if cache_config.cache_dtype not in FLOAT8:
            return None
        cache = cache.view(FLOAT8[cache_config.cache_dtype])
    pages = cache_config.num_gpu_blocks
    dim = next((dim for dim in (1, 0) if dim < cache.dim() and cache.shape[dim] >= pages), None)
    if dim is None or cache.shape[dim] % pages:
        return None
    return cache.movedim(dim, 0).unflatten(0, (pages, -1))  # kernel blocks may be smaller than pages


@torch.inference_mode()
def finite_pages(views: Sequence[Tensor], pages: Sequence[int]) -> list[bool]:
    """Tell whether each page is finite in all views [pages, ...]."""
    if not views or not pages:
        return [True] * len(pages)
    sound = [
        torch.stack([view[some].float().isfinite().flatten(1).all(1) for view in views]).all(0)
        for some in torch.tensor(pages, device=views[0].device).split(BLOCKS_AT_ONCE)
    ]
    return torch.cat(sound).tolist()


def _on_every_rank(sound: list[bool]) -> list[bool]:
    from vllm.distributed import get_pp_group, get_tp_group

    least = torch.tensor(sound, dtype=torch.int32)
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return least.bool().tolist()


def attach(output: Any, found: Answer) -> Any:
    """Copy a worker's output, shared by steps without rows, with an answer."""
    if hasattr(output, "get_output"):  # asynchronous
        get_output = output.get_output
        output.get_output = lambda: attach(get_output(), found)
        return output
    output = copy(output)
    output.mambacache_sound = found
    return output
