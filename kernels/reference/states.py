"""Reading and writing the rows of a state pool, and which decode tokens count."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indices import StateIndices


def read_states(state: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """States [n, ...] of `blocks` [n] in `dtype`; the null block reads as zeros whatever it holds."""
    states = state[blocks].to(dtype)
    states[blocks == 0] = 0
    return states


def write_states(state: Tensor, blocks: Tensor, values: Tensor) -> None:
    """Writes values [n, ...] to `blocks` [n] of the pool, except to the null block."""
    stored = blocks != 0
    state[blocks[stored]] = values[stored].to(state.dtype)


def computed_decode_tokens(indices: StateIndices) -> Tensor:
    """bool [N, T]: tokens with a dst, and the first token of every row with a src; the others are padding."""
    computed = indices.decode_dst != 0
    computed[:, 0] |= indices.decode_src != 0
    return computed


def inner_dtype(activations: torch.dtype, state: torch.dtype) -> torch.dtype:
    """What a recurrence computes in: float64 where activations and state both are, fp32 otherwise."""
    return torch.float64 if activations == state == torch.float64 else torch.float32
