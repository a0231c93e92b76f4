"""Read and write states."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor

from ..indices import StateIndices

Derived = TypeVar("Derived")


def once_a_step(derive: Callable[[StateIndices], Derived]) -> Callable[[StateIndices], Derived]:
    """Derive once for all layers of a step."""

    @wraps(derive)
    def kept(indices: StateIndices) -> Derived:
        name = derive.__qualname__
        if name not in indices.derived:
            indices.derived[name] = derive(indices)
        found: Derived = indices.derived[name]
        return found

    return kept


def read_states(state: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return states; the null block reads as zeros."""
    states = state[blocks].to(dtype)
    states[blocks == 0] = 0
    return states


def write_states(state: Tensor, blocks: Tensor, values: Tensor) -> None:
    stored = blocks != 0
    state[blocks[stored]] = values[stored].to(state.dtype)


@once_a_step
def computed_decode_tokens(indices: StateIndices) -> Tensor:
    """Return bool [N, T]."""
    return torch.arange(indices.tokens_per_decode, device=indices.device) < indices.decode_len[:, None]


@once_a_step
def parents(indices: StateIndices) -> Tensor:
    """Return parents within rows, or -1."""
    width = indices.tokens_per_decode
    others = indices.ancestors.view(-1, width) & ((1 << torch.arange(width, device=indices.device)) - 1)
    bits = (others[..., None] >> torch.arange(width, device=indices.device)) & 1
    return (bits * torch.arange(1, width + 1, device=indices.device)).amax(-1) - 1


@once_a_step
def depths(indices: StateIndices) -> Tensor:
    return (indices.depths[:, None] >> 4 * torch.arange(indices.tokens_per_decode, device=indices.device)) & 15


@once_a_step
def decode_targets(indices: StateIndices) -> Tensor:
    """Return dst blocks, 0 for padding rows."""
    return torch.where(indices.decode_len > 0, indices.decode_dst, 0)


@once_a_step
def computed_tokens(indices: StateIndices) -> Tensor:
    """Return bool [F]."""
    decodes = indices.num_decodes * indices.tokens_per_decode
    computed = torch.zeros(indices.num_tokens, dtype=torch.bool, device=indices.device)
    if decodes:
        computed[:decodes] = computed_decode_tokens(indices).flatten()
    if indices.num_prefills:
        computed[decodes : int(indices.query_start_loc[-1])] = True
    return computed
