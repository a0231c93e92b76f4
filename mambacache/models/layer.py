"""Define the interface of replaced layers."""

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
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


class Mixer(Protocol):
    """Describes a recurrent layer, from [1, F, hidden] to [1, F, hidden]."""

    number: int

    def state_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return a state's tensors: a conv window, then matrices in `state_dtype`."""

    def log_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return a token log's tensors, convolution first."""


@dataclass
class ForwardContext:
    """Holds the inputs of all layers by number."""

    indices: StateIndices
    states: Sequence[tuple[torch.Tensor, ...]]
    logs: Sequence[tuple[torch.Tensor, ...]]
    pages: Sequence[tuple[torch.Tensor, ...]]


_context: ContextVar[ForwardContext] = ContextVar("forward_context")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_context() -> ForwardContext:
    return _context.get()
