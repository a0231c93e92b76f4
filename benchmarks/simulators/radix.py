"""Implement a radix tree over tokens, as in SGLang and Marconi."""

from __future__ import annotations

import numpy as np


class Node:
    """Holds an edge with `tokens` from the end of its parent to position `end`."""

    __slots__ = ("children", "end", "parent", "state", "tokens", "used")

    def __init__(self, parent: Node | None, tokens: np.ndarray, used: int = 0) -> None:
        self.parent = parent
        self.tokens = tokens
        self.end: int = (parent.end if parent is not None else 0) + len(tokens)
        self.children: dict[int, Node] = {}  # by their first token
        self.state = False  # a state is kept at `end`
        self.used = used


def shared(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of equal leading tokens."""
    count = min(len(first), len(second))
    different = first[:count] != second[:count]
    place = int(different.argmax()) if count else 0
    return place if count and different[place] else count


class Tree:
    def __init__(self) -> None:
        self.root = Node(None, np.empty(0, np.int32))
        self.tokens = 0  # in all edges

    def walk(self, tokens: np.ndarray) -> tuple[list[Node], Node | None, int]:
        """Return whole edges along a prompt, root first; the edge that it leaves half-way, if any; and the place."""
        path, place = [self.root], 0
        while place < len(tokens):
            child = path[-1].children.get(int(tokens[place]))
            if child is None:
                break
            place += shared(child.tokens, tokens[place:])
            if place < child.end:
                return path, child, place
            path.append(child)
        return path, None, place

    def split(self, node: Node, place: int) -> Node:
        """Cut an edge, and return its upper part, without a state."""
        parent = node.parent
        assert parent is not None
        cut = place - parent.end
        upper = Node(parent, node.tokens[:cut], node.used)
        parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.parent = node.tokens[cut:], upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def insert(self, tokens: np.ndarray, used: int) -> Node:
        """The node that ends with these tokens, made if there is none."""
        path, half, place = self.walk(tokens)
        node = self.split(half, place) if half is not None else path[-1]
        if place < len(tokens):
            leaf = Node(node, tokens[place:], used)
            node.children[int(leaf.tokens[0])] = leaf
            self.tokens += len(leaf.tokens)
            node = leaf
        return node

    def remove(self, leaf: Node) -> None:
        assert leaf.parent is not None and not leaf.children
        del leaf.parent.children[int(leaf.tokens[0])]
        self.tokens -= len(leaf.tokens)

    def merge(self, node: Node) -> Node:
        """Join a node to its only child, and return the child."""
        (child,) = node.children.values()
        parent = node.parent
        assert parent is not None
        child.tokens, child.parent = np.concatenate([node.tokens, child.tokens]), parent
        parent.children[int(child.tokens[0])] = child
        return child
