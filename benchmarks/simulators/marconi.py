"""Simulate Marconi (MLSys 2025): a radix tree with a state at the end of every node."""

from __future__ import annotations

import numpy as np

from simulators.parts import Budget, Shape
from simulators.radix import Node, Tree

ALPHA = 0.5
"""Weight of saved work against recency, the best value from 0 to 2 on the conversation trace with 25 to 160 GiB.

The paper's search on the first requests gives 1.3 to 2 from 60 GiB on, with fewer hits (16.7 % of the ceiling at 60
GiB, 25.9 % at 120)."""


class Marconi:
    """Keeps states at the ends of answers and at branches, with one budget for states and KV.

    It evicts the node with at most one child and the least worth: recency + ALPHA x operations saved per byte, each
    scaled to 0 .. 1 over these nodes. A node with a child loses only its state.
    """

    def __init__(self, shape: Shape, budget: Budget, alpha: float = ALPHA) -> None:
        self._shape = shape
        self._capacity = budget.total
        self._alpha = alpha
        self._tree = Tree()
        self._nodes: set[Node] = set()
        self._now = 0

    def request(self, prompt: np.ndarray, answer: np.ndarray) -> int:
        self._now += 1
        tokens = np.concatenate([prompt, answer])[:-1]  # the model never reads the last token
        path, half, branch = self._tree.walk(prompt[:-1])
        hit = path[-1].end
        path[-1].used = self._now
        _, _, known = self._tree.walk(tokens)
        states = (half is not None) + (known < len(tokens))
        needed = states * self._shape.state_bytes + (len(tokens) - known) * self._shape.kv_bytes
        if self._make_room(needed, {*path, half}):
            if half is not None:
                upper = self._tree.split(half, branch)
                upper.used = self._now
                self._nodes.add(upper)
            self._nodes.add(self._tree.insert(tokens, self._now))
        return hit

    def _make_room(self, needed: int, locked: set[Node | None]) -> bool:
        while self._used() + needed > self._capacity:
            nodes = [node for node in self._nodes if len(node.children) < 2 and node not in locked]
            if not nodes:
                return False
            least = nodes[int(self._worth(nodes).argmin())]
            self._nodes.remove(least)
            if least.children:
                child = self._tree.merge(least)
                child.used = max(child.used, least.used)
            else:
                self._tree.remove(least)
        return True

    def _used(self) -> int:
        return len(self._nodes) * self._shape.state_bytes + self._tree.tokens * self._shape.kv_bytes

    def _worth(self, nodes: list[Node]) -> np.ndarray:
        ends, lengths, used = np.array([(node.end, len(node.tokens), node.used) for node in nodes], float).T
        saved = self._operations(ends) - self._operations(ends - lengths)
        density = saved / (self._shape.state_bytes + self._shape.kv_bytes * lengths)
        return _scaled(used) + self._alpha * _scaled(density)

    def _operations(self, length: np.ndarray) -> np.ndarray:
        attention = self._shape.attention_layers * self._shape.heads_width
        return 2 * self._shape.active_params * length + 2 * attention * length**2


def _scaled(values: np.ndarray) -> np.ndarray:
    least, most = values.min(), values.max()
    return (values - least) / (most - least) if most > least else np.ones_like(values)
