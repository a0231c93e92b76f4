"""What a token log holds, op by op: the tensors of one slot. Those [FOLD, ...] have an entry for each token.

Sums of log decays are those since the log's first entry, in log2, so that what decays between two tokens is a
difference. No token decays by more than 2^-34.6, which fp32 would not tell from nothing, and by which the sums stay
small.
"""

from __future__ import annotations

from functools import cache

import torch

from mambacache.plan import FOLD

from .state_pool import StateTensor


def inner_dtype(activations: torch.dtype, state: torch.dtype) -> torch.dtype:
    """What a recurrence computes in: float64 where activations and state both are, fp32 otherwise."""
    return torch.float64 if activations == state == torch.float64 else torch.float32


def _entries(*shape: int, dtype: torch.dtype) -> StateTensor:
    """A tensor with an entry of this shape for each token."""
    return StateTensor((FOLD, *shape), dtype, per_token=True)


@cache
def conv1d_log(dim: int, dtype: torch.dtype) -> StateTensor:
    """The raw inputs of a convolution, gated ones if it has an input gate."""
    return _entries(dim, dtype=dtype)


@cache
def gated_delta_rule_log(
    heads: int, value_heads: int, K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[StateTensor, ...]:
    """Keys as they came, the inverses of their norms, u, and the sums of log decays.

    Args:
        dtype: of activations.
    """
    inner = inner_dtype(dtype, state_dtype)
    return (
        _entries(heads, K, dtype=dtype),
        _entries(heads, dtype=inner),
        _entries(value_heads, V, dtype=inner),
        _entries(value_heads, dtype=inner),
    )


@cache
def kda_log(heads: int, K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """As `gated_delta_rule_log`, with sums for every key channel."""
    *others, sums = gated_delta_rule_log(heads, heads, K, V, dtype, state_dtype)
    return (*others, _entries(heads, K, dtype=sums.dtype))


@cache
def ssd_log(
    heads: int, groups: int, P: int, N: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[StateTensor, ...]:
    """x and B as they came, step sizes, and the sums of log decays."""
    inner = inner_dtype(dtype, state_dtype)
    return (
        _entries(heads, P, dtype=dtype),
        _entries(groups, N, dtype=dtype),
        _entries(heads, dtype=inner),
        _entries(heads, dtype=inner),
    )


@cache
def selective_scan_log(dim: int, N: int, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """x, step sizes before bias and softplus, and B, as they came; then the state after the last step's first token.

    The state comes with the entry that follows on it, for every channel: so whoever works on some channels alone reads
    and writes these alone. Tokens from that entry on, drafts that were accepted, are known from their entries.

    Args:
        dtype: of activations.
    """
    return (
        _entries(dim, dtype=dtype),
        _entries(dim, dtype=dtype),
        _entries(N, dtype=dtype),
        StateTensor((dim, N), inner_dtype(dtype, state_dtype)),
        StateTensor((dim,), torch.int32),
    )
