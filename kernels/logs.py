"""Define the tensors in a token log's slot. Tensors [FOLD, ...] have an entry per token.

Sums of log2 decays begin at the first entry. A token's log2 decay is clamped at -34.6, so fp32 sums stay small.
"""

from __future__ import annotations

from functools import cache

import torch

from mambacache.plan import FOLD

from .state_pool import StateTensor


def inner_dtype(activations: torch.dtype, state: torch.dtype) -> torch.dtype:
    """Return float64 if activations and state both are, else fp32."""
    return torch.float64 if activations == state == torch.float64 else torch.float32


def _entries(*shape: int, dtype: torch.dtype) -> StateTensor:
    return StateTensor((FOLD, *shape), dtype, per_token=True)


@cache
def conv1d_log(dim: int, dtype: torch.dtype) -> StateTensor:
    """Lay out raw (or gated) inputs."""
    return _entries(dim, dtype=dtype)


@cache
def gated_delta_rule_log(
    heads: int, value_heads: int, K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[StateTensor, ...]:
    """Lay out raw keys, inverse norms, u and sums of log decays."""
    inner = inner_dtype(dtype, state_dtype)
    return (
        _entries(heads, K, dtype=dtype),
        _entries(heads, dtype=inner),
        _entries(value_heads, V, dtype=inner),
        _entries(value_heads, dtype=inner),
    )


@cache
def kda_log(heads: int, K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """Lay out `gated_delta_rule_log` with sums per key channel."""
    *others, sums = gated_delta_rule_log(heads, heads, K, V, dtype, state_dtype)
    return (*others, _entries(heads, K, dtype=sums.dtype))


@cache
def ssd_log(
    heads: int, groups: int, P: int, N: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> tuple[StateTensor, ...]:
    """Lay out raw x and B, step sizes and sums of log decays."""
    inner = inner_dtype(dtype, state_dtype)
    return (
        _entries(heads, P, dtype=dtype),
        _entries(groups, N, dtype=dtype),
        _entries(heads, dtype=inner),
        _entries(heads, dtype=inner),
    )


@cache
def selective_scan_log(dim: int, N: int, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """Lay out raw x, dt and B, an unrounded state, and its next entry per channel.

    The state is after the last step's first token; later entries are accepted drafts.
    """
    return (
        _entries(dim, dtype=dtype),
        _entries(dim, dtype=dtype),
        _entries(N, dtype=dtype),
        StateTensor((dim, N), inner_dtype(dtype, state_dtype)),
        StateTensor((dim,), torch.int32),
    )
