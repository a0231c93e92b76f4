"""Which checkpoints to write, and which to give up first: the one place to tune on traces."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class Wish(IntEnum):
    """Why a state at a boundary is worth a block; the lower, the sooner it is served."""

    PROMISED = 0  # a waiting request will resume there
    TAIL = 1  # the prompt's last boundary: an identical prompt resumes there
    JUNCTION = 2  # the prompt leaves there what others computed
    MARKED = 3  # the caller named it
    INTERVAL = 4


class Retention:
    """The policy. Positions are in tokens and multiples of `block_size`.

    Asked-for states (every `Wish` but INTERVAL) may evict anything without references, and are evicted last. Others
    take free and cold blocks only, and are evicted first, until a hit or the end of their request heats them.
    """

    def __init__(self, block_size: int, interval: int) -> None:
        self._block_size = block_size
        self._interval = interval

    def tail(self, num_tokens: int) -> int:
        """The last boundary that a prompt of `num_tokens` can resume at."""
        return (num_tokens - 1) // self._block_size * self._block_size

    def wish(self, wishes: Mapping[int, Wish], position: int) -> Wish | None:
        """Why the state at `position` was asked for, or None."""
        wish = wishes.get(position)
        if wish is None and self._interval and position % self._interval == 0:
            return Wish.INTERVAL
        return wish

    def between(self, wishes: Mapping[int, Wish], start: int, end: int) -> list[tuple[Wish, int]]:
        """The wished-for positions strictly between two."""
        found = [(wish, position) for position, wish in wishes.items() if start < position < end]
        if self._interval:
            first = start // self._interval * self._interval + self._interval
            found += [(Wish.INTERVAL, p) for p in range(first, end, self._interval) if p not in wishes]
        return found

    @staticmethod
    def hot(wish: Wish | None) -> bool:
        """Whether a state is kept among the hot ones, and may evict those to get its block."""
        return wish is not None and wish is not Wish.INTERVAL
