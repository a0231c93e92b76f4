"""Every choice: which states to write, which to give up, whom to wait for, and what is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import IntEnum


class Wish(IntEnum):
    """Why a state at a boundary is worth a block; the lower, the sooner it is served."""

    PROMISED = 0  # a waiting request will resume there
    TAIL = 1  # the prompt's last boundary: an identical prompt resumes there
    JUNCTION = 2  # the prompt leaves there what others computed
    MARKED = 3  # the caller named it
    INTERVAL = 4


class Policy:
    """What is stored. Positions are in tokens and multiples of `block_size`.

    Asked-for states (every `Wish` but INTERVAL) may evict anything without references, and are evicted last. Others
    take free and cold blocks only, and are evicted first, until a hit or the end of their request promotes them.

    Args:
        block_size: tokens in a block.
        interval: also store a state every so many tokens; 0 for none.
        max_checkpoints: committed states at a time, at most.
    """

    def __init__(self, block_size: int, interval: int, max_checkpoints: int) -> None:
        self._block_size = block_size
        self._interval = interval
        self.max_checkpoints = max_checkpoints

    def wishes(self, marks: Iterable[int], junction: int, lengths: Iterable[int]) -> dict[int, Wish]:
        """The positions that a request begins its life with: its marks, its junction (0: none), the tails of these
        lengths (its prompt, and all it knew at admission)."""
        wishes = dict.fromkeys(marks, Wish.MARKED)
        if junction:
            wishes[junction] = Wish.JUNCTION
        for length in lengths:
            wishes[(length - 1) // self._block_size * self._block_size] = Wish.TAIL
        return wishes

    def promise(self, wishes: dict[int, Wish], position: int) -> None:
        """A waiting request will resume at this position."""
        wishes[position] = Wish.PROMISED

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

    def gives_up(self, wishes: Mapping[int, Wish], position: int, prefill_end: int) -> bool:
        """Whether a state at the end of a step is given up once the request's next one is committed: in an answer, only
        the last boundary is of use to the next turn."""
        return position > prefill_end and self.wish(wishes, position) is None


class EvictionOrder:
    """Which block goes first: cold ones (nobody asked for them) before hot ones, each least recently used first."""

    def __init__(self) -> None:
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._hot: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cold) + len(self._hot)

    def add(self, block: int, hot: bool) -> None:
        """A block that was used just now."""
        (self._hot if hot else self._cold)[block] = None

    def put_first(self, block: int) -> None:
        """A cold block that is of no use to anyone."""
        self._cold[block] = None
        self._cold.move_to_end(block, last=False)

    def remove(self, block: int, hot: bool) -> None:
        del (self._hot if hot else self._cold)[block]

    def first(self, cold_only: bool) -> int | None:
        """The block to evict; None if there is none, or only hot ones with `cold_only`."""
        for order in (self._cold,) if cold_only else (self._cold, self._hot):
            if order:
                return next(iter(order))
        return None

    def blocks(self) -> set[int]:
        return {*self._cold, *self._hot}
