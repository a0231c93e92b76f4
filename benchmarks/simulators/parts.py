"""What simulators share: the shape of a model, prefixes as integers, and blocks in the order of their last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

GIB = 1 << 30
BLOCK = 64
LONGEST = 1 << 20  # tokens of a prompt and its answer

_FACTORS = np.random.default_rng(0).integers(1, 1 << 63, LONGEST, np.uint64) | np.uint64(1)


@dataclass(frozen=True)
class Shape:
    """Of a model: bytes of a state and of a token's KV, layers of either kind, its width, and its active parameters."""

    state_bytes: int
    kv_bytes: int
    recurrent_layers: int
    attention_layers: int
    heads_width: int  # query heads times their width
    active_params: int


@dataclass(frozen=True)
class Budget:
    """Bytes. Policies with one budget take the sum."""

    state: int
    kv: int

    @property
    def total(self) -> int:
        return self.state + self.kv


class Simulator(Protocol):
    def request(self, prompt: np.ndarray, answer: np.ndarray) -> int:
        """Runs a request to its end, alone; says how many tokens of its prompt were hit."""


def prefixes(tokens: np.ndarray) -> np.ndarray:
    """For each length from 1 on an integer that is equal for equal prefixes; uint64."""
    return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * _FACTORS[: len(tokens)])


def chain(prompt: np.ndarray, answer: np.ndarray, size: int) -> list[int]:
    """The prefixes of a prompt and its answer that end after whole blocks."""
    return prefixes(np.concatenate([prompt, answer]))[size - 1 :: size].tolist()


def state_after(block: int) -> int:
    """What the state after a prefix is called where KV blocks are called by their prefixes."""
    return ~block


class Lru:
    """Blocks with their sizes, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._sizes

    def use(self, keys: Iterable[int], size: int) -> None:
        """Adds blocks, or notes their use; what no longer fits is evicted by `fit`."""
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
