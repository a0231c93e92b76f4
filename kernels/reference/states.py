"""Reading and writing the rows of a state pool, and which tokens are real."""

from __future__ import annotations

from collections.abc import Callable

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


def walk_decodes(
    state: Tensor, indices: StateIndices, dtype: torch.dtype, step: Callable[[Tensor, int], Tensor]
) -> None:
    """Carries every decode row's state from its src through its tokens, and stores it where `decode_targets` say.

    `step(states [N, ...], t)` returns the states after token t of every row. A state is rounded to the pool's dtype
    after every token, as if each had its own step.
    """
    states = read_states(state, indices.decode_src, dtype)
    targets = decode_targets(indices)
    for t in range(indices.tokens_per_decode):
        states = step(states, t).to(state.dtype)
        write_states(state, targets[:, t], states)
        states = states.to(dtype)


def computed_decode_tokens(indices: StateIndices) -> Tensor:
    """bool [N, T]: the tokens before their row's padding."""
    return torch.arange(indices.tokens_per_decode, device=indices.device) < indices.decode_len[:, None]


def decode_targets(indices: StateIndices) -> Tensor:
    """[N, T]: the block for the state after each token, or 0: nothing is stored for padding."""
    return torch.where(computed_decode_tokens(indices), indices.decode_dst, 0)


def computed_tokens(indices: StateIndices) -> Tensor:
    """bool [F]: `computed_decode_tokens` and all tokens of prefill rows; the others are padding."""
    decodes = indices.num_decodes * indices.tokens_per_decode
    computed = torch.zeros(indices.num_tokens, dtype=torch.bool, device=indices.device)
    if decodes:
        computed[:decodes] = computed_decode_tokens(indices).flatten()
    if indices.num_prefills:
        computed[decodes : int(indices.query_start_loc[-1])] = True
    return computed


def inner_dtype(activations: torch.dtype, state: torch.dtype) -> torch.dtype:
    """What a recurrence computes in: float64 where activations and state both are, fp32 otherwise."""
    return torch.float64 if activations == state == torch.float64 else torch.float32
