"""Simulate vLLM 0.33 with `mamba_cache_mode` "align" and its default retention."""

from __future__ import annotations

from math import ceil

import numpy as np

from simulators.parts import Budget, Lru, Shape, chain, state_after

PAGE_UNIT = 16  # tokens


class VllmAlign:
    """Keeps states and KV in one pool of pages.

    A page holds a block's KV of all attention layers, or states of as many recurrent layers, which set the block size.
    States stay at a prompt's last boundary and at the end of its KV hit.
    """

    def __init__(self, shape: Shape, budget: Budget) -> None:
        layer_state, layer_kv = shape.state_bytes / shape.recurrent_layers, shape.kv_bytes / shape.attention_layers
        self.block = ceil(layer_state / layer_kv / PAGE_UNIT) * PAGE_UNIT
        self._state_pages = ceil(shape.recurrent_layers / shape.attention_layers)
        running = self._state_pages
        self._pages = Lru(budget.total // (self.block * shape.kv_bytes) - running)

    def request(self, prompt: np.ndarray, answer: np.ndarray) -> int:
        blocks, pages = chain(prompt, answer, self.block), self._pages
        tail = (len(prompt) - 1) // self.block
        covered = next((depth for depth in range(tail) if blocks[depth] not in pages), tail)
        hit = next((depth for depth in range(covered, 0, -1) if state_after(blocks[depth - 1]) in pages), 0)
        states = sorted({hit, covered, tail} - {0})  # in the order of their release
        pages.use((state_after(blocks[depth - 1]) for depth in states), self._state_pages)
        pages.use(reversed(blocks), 1)  # makes LRU evict a chain from its end
        pages.fit()
        return hit * self.block
