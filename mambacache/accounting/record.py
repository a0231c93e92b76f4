"""A bounded memory of all token prefixes that were computed."""

from __future__ import annotations

from collections import OrderedDict

TOKEN_BYTES = 4


class Branch:
    """Tokens that follow those of its parent, and what followed them.

    `end` is the number of tokens from the beginning to its own last one; 0 for a root, -1 for one that was dropped.
    """

    __slots__ = ("children", "end", "parent", "tokens")

    def __init__(self, parent: Branch | None, tokens: bytes, end: int) -> None:
        self.parent = parent
        self.tokens = bytearray(tokens)
        self.end = end
        self.children: dict[bytes, Branch] = {}  # by their first token


class TokenRecord:
    """A tree of token prefixes. Beyond `max_tokens` the branch that was used longest ago is cut from its end.

    It takes 4 to 5 bytes a token, and some 400 for each branch.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = 0
        self._roots: dict[bytes, Branch] = {}
        self._leaves: OrderedDict[Branch, None] = OrderedDict()  # longest unused first

    def longest(self, root: bytes, tokens: bytes) -> int:
        """Tokens at the beginning of `tokens` (int32) that were computed before under this root."""
        branch = self._roots.get(root)
        if branch is None:
            return 0
        _, common, beyond = self._descend(branch, tokens, 0)
        return (common + beyond) // TOKEN_BYTES

    def add(self, root: bytes, tokens: bytes, known: Branch | None) -> Branch:
        """These tokens were computed.

        Args:
            tokens: int32, from the beginning if `known` is None, else from its end.
            known: the branch at whose end they go on, as an earlier call gave it; it still ends there.

        Returns:
            The branch that ends with them.
        """
        branch = known
        if branch is None:
            branch = self._roots.get(root)
            if branch is None:
                branch = self._roots[root] = Branch(None, b"", 0)
        branch, at, beyond = self._descend(branch, tokens, 0)
        if beyond:
            branch = self._split(branch.children[tokens[at : at + TOKEN_BYTES]], beyond)
            at += beyond
        rest = tokens[at:]
        if rest and branch.parent is not None and not branch.children:
            branch.tokens += rest
            branch.end += len(rest) // TOKEN_BYTES
        elif rest:
            self._leaves.pop(branch, None)
            grown = Branch(branch, rest, branch.end + len(rest) // TOKEN_BYTES)
            branch.children[rest[:TOKEN_BYTES]] = grown
            branch = grown
        if branch.parent is not None and not branch.children:
            self._leaves[branch] = None
            self._leaves.move_to_end(branch)
        self.num_tokens += len(rest) // TOKEN_BYTES
        while self.num_tokens > self._max_tokens:
            self._cut(self.num_tokens - self._max_tokens)
        return branch

    def _descend(self, branch: Branch, tokens: bytes, at: int) -> tuple[Branch, int, int]:
        """From the end of `branch` along `tokens[at:]`: the last branch that is met whole, the bytes of `tokens` up to
        its end, and the bytes that the next one shares beyond it."""
        while True:
            child = branch.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                return branch, at, 0
            common = common_tokens(child.tokens, tokens[at : at + len(child.tokens)]) * TOKEN_BYTES
            if common < len(child.tokens):
                return branch, at, common
            branch, at = child, at + common

    def _split(self, branch: Branch, size: int) -> Branch:
        """A new branch of the first `size` bytes of one, which keeps the rest."""
        parent = branch.parent
        assert parent is not None
        upper = Branch(parent, bytes(branch.tokens[:size]), branch.end - (len(branch.tokens) - size) // TOKEN_BYTES)
        parent.children[bytes(branch.tokens[:TOKEN_BYTES])] = upper
        del branch.tokens[:size]
        branch.parent = upper
        upper.children[bytes(branch.tokens[:TOKEN_BYTES])] = branch
        return upper

    def _cut(self, count: int) -> None:
        """Drops up to `count` tokens of the branch that was used longest ago."""
        branch = next(iter(self._leaves))
        count = min(count, len(branch.tokens) // TOKEN_BYTES)
        first = bytes(branch.tokens[:TOKEN_BYTES])
        del branch.tokens[len(branch.tokens) - count * TOKEN_BYTES :]
        branch.end -= count
        self.num_tokens -= count
        if branch.tokens:
            return
        parent = branch.parent
        assert parent is not None
        del self._leaves[branch], parent.children[first]
        branch.parent, branch.end = None, -1
        if parent.parent is not None and not parent.children:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)
        elif not parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not parent}
            parent.end = -1


def common_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """How many leading tokens two strings of int32 tokens share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // TOKEN_BYTES
    low, high = 0, length  # the first low bytes are equal, the first high bytes are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low // TOKEN_BYTES
