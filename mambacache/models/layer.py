"""Define the interface of replaced layers and the context of a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

from mambacache.kernels import StateIndices, StateTensor


@dataclass(frozen=True)
class KVLayer:
    """Describes the KV of one attention layer."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


class Mixer(Protocol):
    """Describes a recurrent layer with its state in the pool, a module from [1, F, hidden] to [1, F, hidden]."""

    number: int  # among the model's recurrent layers

    def state_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the tensors of one state: a conv window in the model's dtype, then matrices in `state_dtype`."""

    def log_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the tensors of one token log: the convolution's, then the recurrence's."""


@dataclass
class ForwardContext:
    """Holds the inputs of all layers in a forward pass, by the number of the layer among its kind."""

    indices: StateIndices
    states: Sequence[tuple[torch.Tensor, ...]]
    logs: Sequence[tuple[torch.Tensor, ...]]
    pages: Sequence[tuple[torch.Tensor, ...]]


_context: ContextVar[ForwardContext] = ContextVar("forward_context")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Set `context` for layers called inside."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_context() -> ForwardContext:
    """Return the context of the current forward pass."""
    return _context.get()
