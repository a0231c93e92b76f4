"""Simulate a plain LRU policy with a state at each prompt's end."""

from __future__ import annotations

import numpy as np

from simulators.parts import BLOCK, Budget, Lru, Shape, chain, state_after

LONGEST_ANSWER = 64  # blocks between a prompt's end and the end shared by its next turn


class TailLru:
    """Keeps a state at a prompt's last boundary, which replaces the last turn's state, and at junctions.

    Args:
        joint: keep states and KV in one pool, else in two.
        ends: also keep a state at an answer's last boundary, and none is replaced before LRU evicts it.
    """

    def __init__(self, shape: Shape, budget: Budget, joint: bool, ends: bool = False) -> None:
        self._with_ends = ends
        self._state_bytes, self._page_bytes = shape.state_bytes, BLOCK * shape.kv_bytes
        self._states = Lru(budget.total if joint else budget.state)
        self._pages = self._states if joint else Lru(budget.kv)
        self._ends: set[int] = set()  # last blocks of all prompts
        self._seen: set[int] = set()

    def request(self, prompt: np.ndarray, answer: np.ndarray) -> int:
        blocks = chain(prompt, answer[:-1], BLOCK)  # no model reads the last token
        tail = (len(prompt) - 1) // BLOCK
        covered = next((depth for depth in range(tail) if blocks[depth] not in self._pages), tail)
        hit = next((depth for depth in range(covered, 0, -1) if state_after(blocks[depth - 1]) in self._states), 0)
        known = next((depth for depth in range(tail, hit, -1) if blocks[depth - 1] in self._seen), hit)
        reach = range(known, max(known - LONGEST_ANSWER, 0), -1)
        before = next((depth for depth in reach if blocks[depth - 1] in self._ends), 0)
        kept = {tail, hit} if before else {tail, hit, known}  # no prompt branches at the end of a turn
        if self._with_ends:
            kept.add(len(blocks))
            self._ends.update(blocks[-1:])
        elif hit and hit == before and hit < tail:
            kept.remove(hit)
            self._states.drop(state_after(blocks[hit - 1]))
        self._states.use((state_after(blocks[depth - 1]) for depth in sorted(kept - {0})), self._state_bytes)
        self._pages.use(reversed(blocks), self._page_bytes)  # makes LRU evict a chain from its end
        self._states.fit()
        self._pages.fit()
        self._seen.update(blocks)
        self._ends.update(blocks[tail - 1 : tail])
        return hit * BLOCK
