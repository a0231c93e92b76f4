"""Decide which states to store and evict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from heapq import nsmallest
from itertools import accumulate
from math import inf

BRANCHING = 0.1
"""Chains branch if more than this share of next turns continue a continued turn."""

FIRST_RATES = (0.25, 0.4, 0.5, 0.6, 0.7)
"""Initial shares of turns that go on, by rank, from a public chat service."""

SPARES = 2
"""Weight of a block of rank FIRST in the eviction order, beside a spare block's 1."""

USEFUL = 0.05
"""A finished turn keeps a second state if it adds this share of the longest hit to the expected hit."""


class Rank(IntEnum):
    SPARE = 0  # not requested
    FIRST = 1
    SECOND = 2  # minimum for hits and marks
    THIRD = 3
    FOURTH = 4
    LATER = 5


@dataclass(slots=True)
class Turn:
    """Describes a prompt and its answer; depths are in blocks."""

    tail: int
    admitted: int  # time
    rank: Rank = Rank.FIRST
    before: int = 0  # tail of the turn before
    at_end: bool = False  # the computed prefix ends with that turn
    answered: int = 0
    gone_on: bool = False  # a later turn continues it


class Average:
    FIRST, MEMORY = 8, 64

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._count = self.FIRST

    def note(self, value: float) -> None:
        self._count = min(self._count + 1, self.MEMORY)
        self.value += (value - self.value) / self._count


class Rate:
    FIRST, MEMORY = 8, 1024

    def __init__(self, guess: float) -> None:
        self._begun, self._gone_on = float(self.FIRST), self.FIRST * guess

    @property
    def odds(self) -> float:
        return (self._gone_on + 1) / (max(self._begun - self._gone_on, 0) + 1)

    def begin(self) -> None:
        self._begun += 1
        if self._begun > self.MEMORY:
            self._begun, self._gone_on = self._begun / 2, self._gone_on / 2

    def go_on(self) -> None:
        self._gone_on += 1


class Chains:
    """Tracks which chains go on: a computed prefix that ends near a turn continues it."""

    MOST_TURNS = 1 << 16
    LONGEST_ANSWER = 64  # blocks
    LONGEST_TURN = 1024  # tokens

    def __init__(self, block_size: int, blocks: int) -> None:
        self._block_size = block_size
        self.blocks = blocks
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()  # by tail hash
        self.now = 0  # computed blocks
        self._gap = Average(blocks / 2)
        self._rates = [Rate(guess) for guess in FIRST_RATES]  # index 0: FIRST
        self.weights = self.rising_weights = self._weigh()
        self._answer_kept = Average(0.5)
        self._branches = Average(0)

    def begin(self, chain: Sequence[bytes], shared: int, prompt_len: int) -> Turn:
        """Record an admission after `shared` computed blocks."""
        tail = (prompt_len - 1) // self._block_size
        reach = range(shared, max(shared - self.LONGEST_ANSWER, 0), -1)
        before = next((depth for depth in reach if chain[depth] in self._turns), 0)
        turn = Turn(tail, self.now)
        if before:
            last = self._turns[chain[before]]
            self._note_next(last, shared)
            added = prompt_len - shared * self._block_size
            if added <= self.LONGEST_TURN + self._block_size:
                turn.rank = Rank(min(last.rank + 1, Rank.LATER))
            turn.before = before
            turn.at_end = shared in (before, last.answered)
        self._rates[turn.rank - 1].begin()
        self.weights = self._weigh()
        self.rising_weights = [*accumulate(self.weights, max)]
        self._remember(chain[tail], turn)
        return turn

    def _weigh(self) -> list[float]:
        first = self._rates[0].odds
        return [1, *(SPARES * max(rate.odds / first, 1.0) for rate in self._rates)]

    def _note_next(self, last: Turn, shared: int) -> None:
        self._branches.note(last.gone_on)
        if last.answered > last.tail:
            self._answer_kept.note(shared >= last.answered)
        if not last.gone_on:
            last.gone_on = True
            self._rates[last.rank - 1].go_on()
            self._gap.note(self.now - last.admitted)

    def _remember(self, tail_hash: bytes, turn: Turn) -> None:
        replaced = self._turns.pop(tail_hash, None)
        self._turns[tail_hash] = turn
        if replaced is None and len(self._turns) > self.MOST_TURNS:
            self._turns.popitem(last=False)

    def useless(self, turn: Turn, end: int) -> list[int]:
        """Return depths without use for the next turn, which resumes at `end`, or at the tail after an edit."""
        before = [turn.before] if 0 < turn.before < turn.tail and not self.branching else []
        kept = self._answer_kept.value
        if end <= turn.tail:
            return before
        if kept * end > turn.tail:
            return [*before, turn.tail] if (1 - kept) * turn.tail < USEFUL * end else before
        return [*before, end] if kept * (end - turn.tail) < USEFUL * end else before

    @property
    def mean_gap(self) -> float:
        return self._gap.value

    @property
    def branching(self) -> bool:
        return self._branches.value > BRANCHING


class Wish(IntEnum):
    """Orders the reasons to store a state, most urgent first."""

    PROMISED = 0  # a waiting request resumes there
    TAIL = 1  # an identical prompt resumes there
    JUNCTION = 2  # end of the computed prefix
    MARKED = 3
    INTERVAL = 4  # also named positions without a mark


MOST_MARKS = 8
"""Most marks of a request."""

SHARE_OF_MARKS = 4
"""A salt's marks hold at most 1 / SHARE_OF_MARKS of the states."""


class Policy:
    """Decides at which token positions to store states."""

    def __init__(self, block_size: int, interval: int, max_checkpoints: int) -> None:
        self._block_size = block_size
        self._interval = interval
        self.max_checkpoints = max_checkpoints

    @property
    def most_marks(self) -> int:
        return max(self.max_checkpoints // SHARE_OF_MARKS, 1)

    def marks(self, named: Iterable[int], prompt_len: int) -> frozenset[int]:
        most = min(MOST_MARKS, self.most_marks)
        return frozenset(nsmallest(most, {*named} - {0}, key=lambda position: (abs(position - prompt_len), position)))

    def wishes(self, named: Iterable[int], marks: Set[int], junction: int, lengths: Sequence[int]) -> dict[int, Wish]:
        """Return a new residency's wishes, with tails of `lengths`; beyond them only marks count."""
        inside = [position for position in named if position < lengths[-1] and position not in marks]
        wishes = dict.fromkeys(inside, Wish.INTERVAL) | dict.fromkeys(marks, Wish.MARKED)
        if junction:
            wishes[junction] = Wish.JUNCTION
        for length in lengths:
            wishes[(length - 1) // self._block_size * self._block_size] = Wish.TAIL
        return wishes

    def promise(self, wishes: dict[int, Wish], position: int) -> None:
        wishes[position] = Wish.PROMISED

    def wish(self, wishes: Mapping[int, Wish], position: int) -> Wish | None:
        wish = wishes.get(position)
        if wish is None and self._interval and position % self._interval == 0:
            return Wish.INTERVAL
        return wish

    def between(self, wishes: Mapping[int, Wish], start: int, end: int) -> list[tuple[Wish, int]]:
        found = [(wish, position) for position, wish in wishes.items() if start < position < end]
        if self._interval:
            first = start // self._interval * self._interval + self._interval
            found += [(Wish.INTERVAL, p) for p in range(first, end, self._interval) if p not in wishes]
        return found

    @staticmethod
    def requested(wish: Wish | None) -> bool:
        return wish is not None and wish is not Wish.INTERVAL

    def rank(self, wish: Wish | None, rank: Rank) -> Rank:
        """Return a state's rank; `States` raises it for marks."""
        if not self.requested(wish):
            return Rank.SPARE
        return max(rank, Rank.SECOND) if wish in (Wish.PROMISED, Wish.JUNCTION) else rank

    def gives_up(self, wishes: Mapping[int, Wish], position: int, prefill_end: int) -> bool:
        """Tell whether the next commit drops this state inside an answer."""
        return position > prefill_end and self.wish(wishes, position) is None


class Marks:
    """Tracks the latest marks: at most `of_a_salt` per salt, `most` in all."""

    def __init__(self, of_a_salt: int, most: int) -> None:
        self._of_a_salt, self._most, self._count = of_a_salt, most, 0
        self._salts: OrderedDict[str, OrderedDict[bytes, Rank]] = OrderedDict()  # oldest first

    def add(self, salt: str, block_hash: bytes, rank: Rank) -> tuple[bytes, Rank] | None:
        marks = self._salts.setdefault(salt, OrderedDict())
        self._salts.move_to_end(salt)
        self._count += block_hash not in marks
        marks[block_hash] = marks.pop(block_hash, rank)
        if len(marks) <= self._of_a_salt and self._count <= self._most:
            return None
        oldest = salt if len(marks) > self._of_a_salt else next(iter(self._salts))
        lost = self._salts[oldest].popitem(last=False)
        self._count -= 1
        if not self._salts[oldest]:
            del self._salts[oldest]
        return lost

    def has(self, salt: str, block_hash: bytes) -> bool:
        return block_hash in self._salts.get(salt, ())

    def hit(self, salt: str, block_hash: bytes) -> None:
        """Let a displaced mark keep rank SECOND."""
        if self.has(salt, block_hash):
            self._salts[salt][block_hash] = max(self._salts[salt][block_hash], Rank.SECOND)


class EvictionOrder:
    """Orders blocks by coldness, (age + mean gap) / weight: rank decides among young blocks.

    With `rising` weights no block goes before another of lower rank and earlier use.
    """

    def __init__(self, chains: Chains, rising: bool = False) -> None:
        self._chains, self._rising = chains, rising
        self._idle: list[OrderedDict[int, float]] = [OrderedDict() for _ in Rank]  # last use
        self._back: list[OrderedDict[int, float]] = [OrderedDict() for _ in Rank]  # separate: both stay sorted
        self._all = (*self._idle, *self._back)
        self._going: tuple[OrderedDict[int, float], float, float, int, list[float]] | None = None
        """The last victim's list and weight, the highest coldness in other lists, the time, and all weights."""
        self._count = 0

    @property
    def _weights(self) -> list[float]:
        return self._chains.rising_weights if self._rising else self._chains.weights

    def __len__(self) -> int:
        return self._count

    def add(self, block: int, rank: Rank) -> None:
        self._idle[rank][block] = self._chains.now
        self._count, self._going = self._count + 1, None

    def put_first(self, block: int) -> None:
        spare = self._idle[Rank.SPARE]
        spare[block] = -inf
        self._count, self._going = self._count + 1, None
        spare.move_to_end(block, last=False)

    def put_back(self, block: int, rank: Rank, used: float) -> None:
        self._back[rank][block] = used
        self._count, self._going = self._count + 1, None

    def remove(self, block: int, rank: Rank) -> float:
        idle = self._idle[rank]
        self._count -= 1
        return (idle if block in idle else self._back[rank]).pop(block)

    def first(self, requested: bool) -> int | None:
        """Return the next victim; unless `requested`, none hotter than a fresh spare block."""
        now, gap, weights = self._chains.now, self._chains.mean_gap, self._weights
        if requested and self._going is not None:  # victims mostly share a list
            idle, weight, others, then, weighed = self._going
            if idle and then == now and weighed is weights:
                block, used = next(iter(idle.items()))
                if (now - used + gap) / weight > others:
                    return block
        found, most, others, going = None, 0 if requested else gap, -inf, None
        for each in self._weighed():
            idle, weight = each
            if idle:
                block, used = next(iter(idle.items()))
                cold = (now - used + gap) / weight
                if cold > most or (found is None and cold == most):
                    others = most if found is not None else others
                    found, most, going = block, cold, each
                elif cold > others:
                    others = cold
        self._going = (*going, others, now, weights) if requested and going is not None else None
        return found

    def coldness(self) -> float:
        """Return the highest coldness above rank SPARE."""
        now, gap = self._chains.now, self._chains.mean_gap
        heads = [
            (now - next(iter(idle.values())) + gap) / weight
            for ranks in (self._idle, self._back)
            for idle, weight in zip(ranks[Rank.FIRST :], self._weights[Rank.FIRST :], strict=True)
            if idle
        ]
        return max(heads, default=-inf)

    def limit(self, count: int) -> float:
        """Return the coldness of about the `count`th next victim, or infinity."""
        now, gap = self._chains.now, self._chains.mean_gap
        limit = inf
        heads = [
            ((now - next(iter(idle.values())) + gap) / weight, len(idle)) for idle, weight in self._weighed() if idle
        ]
        for cold, length in sorted(heads, reverse=True):
            if count <= 0:
                break
            limit = cold
            count -= length
        return limit

    def coldest(self, limit: float, within: int) -> int | None:
        """Return the coldest block above SPARE, not put back, that reaches `limit` within `within` blocks."""
        then, gap = self._chains.now + within, self._chains.mean_gap
        found, most = None, limit
        for idle, weight in list(zip(self._idle, self._weights, strict=True))[Rank.FIRST :]:
            if idle:
                block, used = next(iter(idle.items()))
                if (cold := (then - used + gap) / weight) >= most:
                    found, most = block, cold
        return found

    def by_rank(self) -> list[int]:
        ranks = [*range(Rank.FIRST, len(Rank)), Rank.SPARE]
        return [block for rank in ranks for each in (self._back, self._idle) for block in each[rank]]

    def _weighed(self) -> Iterator[tuple[OrderedDict[int, float], float]]:
        weights = self._weights
        return zip(self._all, weights + weights, strict=True)

    def blocks(self) -> set[int]:
        return set().union(*self._all)
