"""What a replaced layer tells of its memory, and what a forward pass tells its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

from mambacache.kernels import StateIndices, StateTensor


@dataclass(frozen=True)
class KVLayer:
    """The key and value widths of one attention layer."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


class Mixer(Protocol):
    """A recurrent layer that keeps its state in the pool: a module from hidden states [1, F, hidden] to the same."""

    def state_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The tensors of one state: conv windows of W - 1 rows first, then recurrent matrices in `state_dtype`."""

    def log_layout(self, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Those of one token log: the convolution's first, then the recurrence's."""


@dataclass
class ForwardContext:
    """What the layers of one forward pass read beside their hidden states.

    The n-th recurrent layer that is called takes the n-th tensors of `states` and `logs`, the n-th attention call the
    n-th of `pages`: the order of calls is the same in every pass, even where layers share a module.
    """

    indices: StateIndices
    states: Iterator[tuple[torch.Tensor, ...]]
    logs: Iterator[tuple[torch.Tensor, ...]]
    pages: Iterator[tuple[torch.Tensor, ...]]


_context: ContextVar[ForwardContext] = ContextVar("forward_context")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Makes `context` the one that layers called inside see."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_context() -> ForwardContext:
    """The context of the forward pass that is running."""
    return _context.get()
