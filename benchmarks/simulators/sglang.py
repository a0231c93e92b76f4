"""Simulate SGLang 0.5.23: a radix tree with states at the ends of nodes (strategy "extra_buffer"), and two pools."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from simulators.parts import Budget, Shape
from simulators.radix import Node, Tree

PREFILL = 8192  # tokens of a forward pass, which stores one state
GRID = 64  # the state stands at a multiple of these tokens after the start of the pass
DECODE_INTERVAL = 256
RUNNING_STATES = 3  # a running request's state, and two states to be stored


def divided(total: int) -> Budget:
    """Divide a memory as SGLang does (mamba_full_memory_ratio, 0.9 by default)."""
    state = int(total * 0.9 / 1.9)
    return Budget(state, total - state)


class SglangRadix:
    """Keeps no KV without a state behind it.

    The eviction of a state keeps the KV of an inner node but removes a leaf. KV is evicted by leaves. A hit refreshes
    its state, and the KV of all nodes on its path.
    """

    def __init__(self, shape: Shape, budget: Budget) -> None:
        self._max_states = budget.state // shape.state_bytes - RUNNING_STATES
        self._max_tokens = budget.kv // shape.kv_bytes
        self._tree = Tree()
        self._states: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self._leaves: set[Node] = set()
        self._locked: set[Node] = set()
        self._private = 0  # tokens of the running request outside the tree
        self._now = 0

    def request(self, prompt: np.ndarray, answer: np.ndarray) -> int:
        self._now += 1
        tokens, length = np.concatenate([prompt, answer]), len(prompt)
        hit, branch = self._match(prompt[:-1])
        self._private = 0
        for start in range(hit, length, PREFILL):
            end = min(start + PREFILL, length)
            self._take(end - start)
            if end - start >= GRID:
                at_branch = start < branch <= end and (branch - start) % GRID == 0
                position = branch if at_branch else start + (end - start) // GRID * GRID
                self._store(tokens[:position], end)
        last = len(tokens) - 1  # the model never reads the last token
        self._take(max(last - length, 0))
        if last // DECODE_INTERVAL * DECODE_INTERVAL > length:
            self._store(tokens[: last // DECODE_INTERVAL * DECODE_INTERVAL], last)
        self._locked = set()
        return hit

    def _match(self, tokens: np.ndarray) -> tuple[int, int]:
        """Return the end of the hit, and the place behind it where the prompt leaves the cached KV, or 0."""
        path, half, place = self._tree.walk(tokens)
        if half is not None:
            path.append(self._split(half, place))
        for node in path:
            node.used = self._now
        hit = next(node for node in reversed(path) if node.state or node is self._tree.root)
        if hit.state:
            self._states.move_to_end(hit)
        self._lock(hit)
        branch = place // GRID * GRID
        return hit.end, branch if branch > hit.end else 0

    def _take(self, count: int) -> None:
        """Make room for the KV of `count` tokens."""
        self._private += count
        while self._tree.tokens + self._private > self._max_tokens:
            leaves = [leaf for leaf in self._leaves if leaf not in self._locked]
            if not leaves:
                return
            self._delete(min(leaves, key=lambda leaf: leaf.used))

    def _store(self, tokens: np.ndarray, computed: int) -> None:
        """Store a state behind `tokens`, and their KV, in the tree."""
        path, half, place = self._tree.walk(tokens)
        node = self._split(half, place) if half is not None else path[-1]
        self._lock(node)
        for passed in self._locked:
            passed.used = self._now
        if place < len(tokens) or not node.state:
            if not self._make_slot():
                return
            if place < len(tokens):
                self._leaves.discard(node)
                node = self._tree.insert(tokens, self._now)
                self._leaves.add(node)
            node.state = True
            self._states[node] = None
        self._states.move_to_end(node)
        self._private = computed - len(tokens)
        self._lock(node)

    def _make_slot(self) -> bool:
        while len(self._states) >= self._max_states:
            node = next((node for node in self._states if node not in self._locked), None)
            if node is None:
                return False
            if node.children:
                node.state = False
                del self._states[node]
            else:
                self._delete(node)
        return True

    def _delete(self, leaf: Node) -> None:
        """Delete a leaf with its KV, and ancestors without a state and another child."""
        parent = leaf.parent
        assert parent is not None
        self._tree.remove(leaf)
        self._leaves.discard(leaf)
        if leaf.state:
            del self._states[leaf]
        if parent is self._tree.root or parent.children:
            return
        if parent.state or parent in self._locked:
            self._leaves.add(parent)
        else:
            self._delete(parent)

    def _split(self, node: Node, place: int) -> Node:
        upper = self._tree.split(node, place)
        if node in self._locked:
            self._locked.add(upper)
        return upper

    def _lock(self, node: Node | None) -> None:
        """Lock the running request's nodes only."""
        self._locked = set()
        while node is not None:
            self._locked.add(node)
            node = node.parent
