"""The plain policy: a state at each prompt's end, and what was used least recently goes first."""

from __future__ import annotations

import numpy as np

from simulators.parts import BLOCK, Budget, Lru, Shape, chain, state_after

LONGEST_ANSWER = 64  # blocks, between a prompt's end and what its next turn shares


class TailLru:
    """Keeps a state at a prompt's last boundary, in place of the one of the turn before, and at junctions.

    Args:
        joint: states and KV in one pool; else each in its own.
    """

    def __init__(self, shape: Shape, budget: Budget, joint: bool) -> None:
        self._state_bytes, self._page_bytes = shape.state_bytes, BLOCK * shape.kv_bytes
        self._states = Lru(budget.total if joint else budget.state)
        self._pages = self._states if joint else Lru(budget.kv)
        self._ends: set[int] = set()  # of all prompts
        self._seen: set[int] = set()

    def request(self, prompt: np.ndarray, answer: np.ndarray) -> int:
        blocks = chain(prompt, answer, BLOCK)
        tail = (len(prompt) - 1) // BLOCK
        covered = next((depth for depth in range(tail) if blocks[depth] not in self._pages), tail)
        hit = next((depth for depth in range(covered, 0, -1) if state_after(blocks[depth - 1]) in self._states), 0)
        known = next((depth for depth in range(tail, hit, -1) if blocks[depth - 1] in self._seen), hit)
        reach = range(known, max(known - LONGEST_ANSWER, 0), -1)
        before = next((depth for depth in reach if blocks[depth - 1] in self._ends), 0)
        kept = {tail, hit} if before else {tail, hit, known}  # nobody branches where a turn ended
        if hit and hit == before and hit < tail:
            kept.remove(hit)
            self._states.drop(state_after(blocks[hit - 1]))
        self._states.use((state_after(blocks[depth - 1]) for depth in kept - {0}), self._state_bytes)
        self._pages.use(reversed(blocks), self._page_bytes)  # a chain is evicted from its end
        self._states.fit()
        self._pages.fit()
        self._seen.update(blocks)
        self._ends.update(blocks[tail - 1 : tail])
        return hit * BLOCK
