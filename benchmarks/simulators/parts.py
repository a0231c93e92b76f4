"""Share a model's shape, prefixes as integers, and LRU blocks among simulators."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

GIB = 1 << 30
BLOCK = 64
LONGEST = 1 << 20  # maximum of tokens in a prompt and its answer

_FACTORS = np.random.default_rng(0).integers(1, 1 << 63, LONGEST, np.uint64) | np.uint64(1)


@dataclass(frozen=True)
class Shape:
    """Describes a model: bytes of a state and of a token's KV, numbers of layers, width and active parameters."""

    state_bytes: int
    kv_bytes: int
    recurrent_layers: int
    attention_layers: int
    heads_width: int  # query heads times their width
    active_params: int


@dataclass(frozen=True)
class Budget:
    """Holds bytes for states and KV; policies with one budget take the sum."""

    state: int
    kv: int

    @property
    def total(self) -> int:
        return self.state + self.kv


class Simulator(Protocol):
    def request(self, prompt: np.ndarray, answer: np.ndarray) -> int:
        """Run a request alone to its end, and return the number of hit prompt tokens."""


def prefixes(tokens: np.ndarray) -> np.ndarray:
    """Return a hash of each prefix from length 1 on, uint64."""
    return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * _FACTORS[: len(tokens)])


def chain(prompt: np.ndarray, answer: np.ndarray, size: int) -> list[int]:
    """Return the prefix hashes of a prompt and its answer at the ends of whole blocks."""
    return prefixes(np.concatenate([prompt, answer]))[size - 1 :: size].tolist()


def state_after(block: int) -> int:
    """Return the key of the state behind a prefix, distinct from the prefix's KV block."""
    return ~block


class Lru:
    """Holds blocks with their sizes, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._sizes

    def use(self, keys: Iterable[int], size: int) -> None:
        """Add blocks or mark them as used; `fit` evicts."""
        sizes = self._sizes
        for key in keys:
            if key in sizes:
                sizes.move_to_end(key)
            else:
                sizes[key] = size
                self.used += size

    def drop(self, key: int) -> None:
        self.used -= self._sizes.pop(key, 0)

    def fit(self) -> None:
        while self.used > self.capacity:
            self.used -= self._sizes.popitem(last=False)[1]
