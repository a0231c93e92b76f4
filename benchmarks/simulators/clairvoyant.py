"""Bound the hits of any policy with knowledge of future requests."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np
from trace_tokens import Request

from simulators.parts import BLOCK, Budget, Shape, chain


class Clairvoyant:
    """Keeps in one pool only blocks for the next request that shares them, and evicts the latest needed first.

    A request's hit is kept or evicted as a whole: the state behind its last shared block, and the KV of all shared
    blocks. The choice is greedy, in blocks of 64 tokens, so slightly below the optimum.
    """

    def __init__(self, shape: Shape, budget: Budget, trace: Sequence[Request]) -> None:
        self._state_bytes, self._page_bytes = shape.state_bytes, BLOCK * shape.kv_bytes
        self._capacity = budget.total
        self._goals = [request.ceiling // BLOCK for request in trace]  # blocks
        self._pages: list[Counter[int]] = []  # by request: its blocks by the request that needs them next
        self._states: list[list[tuple[int, int]]] = []  # by request: depths in blocks, and requests that resume there
        self._look_ahead(trace)
        self._now = -1
        self._kept: dict[int, int] = {}  # bytes, by the request that needs them
        self._latest: list[int] = []  # heap of the negative numbers of these requests
        self._lost: set[int] = set()  # requests with an evicted hit
        self._resumable: set[int] = set()  # requests with a kept state
        self._used = 0

    def _look_ahead(self, trace: Sequence[Request]) -> None:
        needs: dict[int, int] = {}
        resumes: dict[int, int] = {}
        for number in range(len(trace) - 1, -1, -1):
            blocks, goal = chain(trace[number].prompt, trace[number].answer, BLOCK), self._goals[number]
            self._pages.append(Counter(needs[block] for block in blocks if block in needs))
            self._states.append([(d, resumes[block]) for d, block in enumerate(blocks, 1) if block in resumes])
            needs.update(dict.fromkeys(blocks[:goal], number))
            if goal:
                resumes[blocks[goal - 1]] = number
        self._pages.reverse()
        self._states.reverse()

    def request(self, prompt: np.ndarray, answer: np.ndarray) -> int:
        self._now += 1
        self._used -= self._kept.pop(self._now, 0)
        hit = self._goals[self._now] if self._now in self._resumable and self._now not in self._lost else 0
        for depth, later in self._states[self._now]:
            if depth >= hit and later not in self._resumable:
                self._resumable.add(later)
                self._keep(later, self._state_bytes)
        for later, count in self._pages[self._now].items():
            self._keep(later, count * self._page_bytes)
        while self._used > self._capacity:
            last = -heapq.heappop(self._latest)
            self._used -= self._kept.pop(last, 0)
            self._lost.add(last)
        return hit * BLOCK

    def _keep(self, later: int, size: int) -> None:
        if later in self._lost:
            return
        if later not in self._kept:
            self._kept[later] = 0
            heapq.heappush(self._latest, -later)
        self._kept[later] += size
        self._used += size
