"""Which states are stored, given up and evicted, learnt from the chains of prompts and turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from heapq import nsmallest
from math import inf

BRANCHING = 0.1
"""Of turns that go on from a prompt, the share of second ones above which its state is kept after the first."""

FIRST_RATES = (0.25, 0.4, 0.5, 0.6, 0.7)
"""First guesses of how often turns go on, by rank from FIRST on: those of a public chat service."""

SPARES = 2
"""How many times the odds of a state that nobody asked for one has that somebody did."""

USEFUL = 0.05
"""Of what its next turn may hit, the share that a second state of a request must add to be kept like the first."""


class Rank(IntEnum):
    """What a block was kept for: from SECOND on its chain went on so often, as far as is counted."""

    SPARE = 0  # nobody asked for it
    FIRST = 1
    SECOND = 2  # what was hit, and what the caller named or a waiting request was promised, are no less
    THIRD = 3
    FOURTH = 4
    LATER = 5


@dataclass(slots=True)
class Turn:
    """One prompt and its answer, as one of the turns of a chain. Depths are in blocks.

    Args:
        tail: where its prompt's last state stands.
        admitted: when.
        rank: how often its chain went on, each time with a prompt that added little.
        before: the tail of the turn that it goes on from; 0 for none.
        at_end: that turn's answer, or its prompt, ends just where the prompt leaves what others computed.
        answered: where prompt and answer end; 0 before.
        gone_on: a later prompt begins with it.
    """

    tail: int
    admitted: int
    rank: Rank = Rank.FIRST
    before: int = 0
    at_end: bool = False
    answered: int = 0
    gone_on: bool = False


class Average:
    """Of the last `MEMORY` values about; a first guess counts for `FIRST` of them."""

    FIRST, MEMORY = 8, 64

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._count = self.FIRST

    def note(self, value: float) -> None:
        self._count = min(self._count + 1, self.MEMORY)
        self.value += (value - self.value) / self._count


class Rate:
    """How often turns go on; what is long past counts less and less."""

    FIRST, MEMORY = 8, 1024

    def __init__(self, guess: float) -> None:
        self._begun, self._gone_on = float(self.FIRST), self.FIRST * guess

    @property
    def odds(self) -> float:
        """That a turn goes on rather than not; one of each is added, so that they are neither 0 nor without end."""
        return (self._gone_on + 1) / (max(self._begun - self._gone_on, 0) + 1)

    def begin(self) -> None:
        self._begun += 1
        if self._begun > self.MEMORY:
            self._begun, self._gone_on = self._begun / 2, self._gone_on / 2

    def go_on(self) -> None:
        self._gone_on += 1


class Chains:
    """Which chains go on: most prompts are never continued, and those that were are likely to be again.

    A prompt that begins where an earlier one ended, and adds little, is the next turn of its chain. Time is counted in
    blocks that were computed.

    Args:
        block_size: tokens in a block.
        blocks: what the cache holds: half of it is the first guess of the time after which chains go on.
    """

    MOST_TURNS = 1 << 16
    LONGEST_ANSWER = 64  # blocks, between a prompt's tail and what the next turn shares
    LONGEST_TURN = 1024  # tokens that a next turn adds

    def __init__(self, block_size: int, blocks: int) -> None:
        self._block_size = block_size
        self.blocks = blocks
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()  # by the hash at their tail
        self.now = 0
        self._gap = Average(blocks / 2)  # from a turn to the next one
        self._rates = [Rate(guess) for guess in FIRST_RATES]  # by rank, from FIRST on
        self.weights = self._weigh()
        self._answer_kept = Average(0.5)  # in the next turn
        self._branches = Average(0)  # next turns of what went on before

    def begin(self, chain: Sequence[bytes], shared: int, prompt_len: int) -> Turn:
        """A prompt is admitted of whose chain so many blocks were ever computed."""
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
        self._remember(chain[tail], turn)
        return turn

    def _weigh(self) -> list[float]:
        """For each rank its odds to be used again, against those of what nobody asked for."""
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
        """Of the states that a finished turn leaves, those that its chain will not miss: after so many blocks.

        A next turn resumes at the end of the answer, or at the prompt's tail where the answer was edited, or is asked
        for once more; never at the turn before, unless chains branch.

        Args:
            end: where the last state of the answer stands; no deeper than the tail where there is none.
        """
        before = [turn.before] if 0 < turn.before < turn.tail and not self.branching else []
        kept = self._answer_kept.value
        if end <= turn.tail:
            return before
        if kept * end > turn.tail:
            return [*before, turn.tail] if (1 - kept) * turn.tail < USEFUL * end else before
        return [*before, end] if kept * (end - turn.tail) < USEFUL * end else before

    @property
    def mean_gap(self) -> float:
        """How long after a turn its chain goes on."""
        return self._gap.value

    @property
    def branching(self) -> bool:
        """Whether the end of a turn is of use after a chain went on from it."""
        return self._branches.value > BRANCHING


class Wish(IntEnum):
    """Why a state at a boundary is worth a block; the lower, the sooner it is served."""

    PROMISED = 0  # a waiting request will resume there
    TAIL = 1  # the prompt's last boundary: an identical prompt resumes there
    JUNCTION = 2  # the prompt leaves there what others computed
    MARKED = 3  # the caller named it
    INTERVAL = 4  # or the caller named more than its marks


MOST_MARKS = 8
"""Marks of one request, at most."""

SHARE_OF_MARKS = 4
"""The marks of one salt hold a quarter of the states, at most."""


class Policy:
    """What is stored. Positions are in tokens and multiples of `block_size`.

    Asked-for states (every `Wish` but INTERVAL) may evict anything without references; others take free blocks, spare
    ones, and such as were not used for long.

    Args:
        block_size: tokens in a block.
        interval: also store a state every so many tokens; 0 for none.
        max_checkpoints: committed states at a time, at most.
    """

    def __init__(self, block_size: int, interval: int, max_checkpoints: int) -> None:
        self._block_size = block_size
        self._interval = interval
        self.max_checkpoints = max_checkpoints

    @property
    def most_marks(self) -> int:
        """States that the marks of one salt may hold."""
        return max(self.max_checkpoints // SHARE_OF_MARKS, 1)

    def marks(self, named: Iterable[int], prompt_len: int) -> frozenset[int]:
        """Return the marks among the positions that a caller named: the nearest to the end of its prompt."""
        most = min(MOST_MARKS, self.most_marks)
        return frozenset(nsmallest(most, {*named} - {0}, key=lambda position: (abs(position - prompt_len), position)))

    def wishes(self, named: Iterable[int], marks: Set[int], junction: int, lengths: Sequence[int]) -> dict[int, Wish]:
        """Return the positions that a request wishes for when its residency begins.

        Args:
            named: the positions that its caller named. Behind its tokens only marks count.
            marks: the marks among these positions.
            junction: the position where it leaves the prompts of others; 0 for none.
            lengths: the lengths of its prompt and of all its tokens at admission; each has a tail.
        """
        inside = [position for position in named if position < lengths[-1] and position not in marks]
        wishes = dict.fromkeys(inside, Wish.INTERVAL) | dict.fromkeys(marks, Wish.MARKED)
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
    def requested(wish: Wish | None) -> bool:
        """Whether somebody asked for a state: then it may evict whatever has no references."""
        return wish is not None and wish is not Wish.INTERVAL

    def rank(self, wish: Wish | None, rank: Rank) -> Rank:
        """Return the rank of a state in a chain of this rank. `States` raises it for a mark."""
        if not self.requested(wish):
            return Rank.SPARE
        return max(rank, Rank.SECOND) if wish in (Wish.PROMISED, Wish.JUNCTION) else rank

    def gives_up(self, wishes: Mapping[int, Wish], position: int, prefill_end: int) -> bool:
        """Whether a state at the end of a step is given up once the request's next one is committed: in an answer, only
        the last boundary is of use to the next turn."""
        return position > prefill_end and self.wish(wishes, position) is None


class Marks:
    """The states that callers named last, by hash. A mark stays one when other requests use its state.

    Args:
        of_a_salt: marks of one salt, at most.
        most: marks of all salts, at most.
    """

    def __init__(self, of_a_salt: int, most: int) -> None:
        self._of_a_salt, self._most, self._count = of_a_salt, most, 0
        self._salts: OrderedDict[str, OrderedDict[bytes, Rank]] = OrderedDict()  # the last ones to be named are last

    def add(self, salt: str, block_hash: bytes, rank: Rank) -> tuple[bytes, Rank] | None:
        """Note a mark, whose state would have this rank without it.

        Returns:
            The hash of the state that lost its mark for it, and its rank without a mark; None if no state did.
        """
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
        """Whether the state of this hash is a mark."""
        return block_hash in self._salts.get(salt, ())

    def hit(self, salt: str, block_hash: bytes) -> None:
        """A state was hit. If it is a mark, it ranks as SECOND even after it loses its mark."""
        if self.has(salt, block_hash):
            self._salts[salt][block_hash] = max(self._salts[salt][block_hash], Rank.SECOND)


class EvictionOrder:
    """Which block goes first: the one whose time without use, divided by the odds that it is used again, is longest.

    The mean time after which chains go on is added to all times: while ages are small against it, ranks decide, and
    later age does, so that a chain that is dead leaves at last. A block that nobody asked for takes the place of one
    that somebody did only if that is older than the weights say.
    """

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._idle: list[OrderedDict[int, float]] = [OrderedDict() for _ in Rank]  # block -> when it was used last
        self._back: list[OrderedDict[int, float]] = [OrderedDict() for _ in Rank]  # of those that were put back
        self._all = (*self._idle, *self._back)
        self._going: tuple[OrderedDict[int, float], float, float, int, list[float]] | None = None
        """The list whose block went last, its weight, how cold others were at most, when, and by which weights."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: int, rank: Rank) -> None:
        """A block that was used just now."""
        self._idle[rank][block] = self._chains.now
        self._count, self._going = self._count + 1, None

    def put_first(self, block: int) -> None:
        """A spare block that is of no use to anyone."""
        spare = self._idle[Rank.SPARE]
        spare[block] = -inf
        self._count, self._going = self._count + 1, None
        spare.move_to_end(block, last=False)

    def put_back(self, block: int, rank: Rank, used: float) -> None:
        """A block that `remove` gave with the time when it was used last, and that was not used meanwhile: it goes when
        it would have gone. Blocks come back in the order in which they were removed."""
        self._back[rank][block] = used
        self._count, self._going = self._count + 1, None

    def remove(self, block: int, rank: Rank) -> float:
        """Gives the time when the block was used last."""
        idle = self._idle[rank]
        self._count -= 1
        return (idle if block in idle else self._back[rank]).pop(block)

    def first(self, requested: bool) -> int | None:
        """The block to evict for a new one, which somebody asked for or not; None if it is worth less than all."""
        now, gap, weights = self._chains.now, self._chains.mean_gap, self._chains.weights
        if requested and self._going is not None:  # of many that go at once, most are from one list
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
        """How cold the coldest block is that somebody asked for: its time without use, divided by the odds; minus
        infinity for none."""
        now, gap = self._chains.now, self._chains.mean_gap
        heads = [
            (now - next(iter(idle.values())) + gap) / weight
            for ranks in (self._idle, self._back)
            for idle, weight in zip(ranks[Rank.FIRST :], self._chains.weights[Rank.FIRST :], strict=True)
            if idle
        ]
        return max(heads, default=-inf)

    def limit(self, count: int) -> float:
        """How cold the first blocks to go are at least, about so many of them: their time without use, divided by the
        odds. Infinite for none."""
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
        """The coldest block that somebody asked for and that was not put back; None if it will not be as cold as this
        `limit` within so much time."""
        then, gap = self._chains.now + within, self._chains.mean_gap
        found, most = None, limit
        for idle, weight in list(zip(self._idle, self._chains.weights, strict=True))[Rank.FIRST :]:
            if idle:
                block, used = next(iter(idle.items()))
                if (cold := (then - used + gap) / weight) >= most:
                    found, most = block, cold
        return found

    def by_rank(self) -> list[int]:
        """Return all blocks, of each rank those first that go first; spare blocks come last."""
        ranks = [*range(Rank.FIRST, len(Rank)), Rank.SPARE]
        return [block for rank in ranks for each in (self._back, self._idle) for block in each[rank]]

    def _weighed(self) -> Iterator[tuple[OrderedDict[int, float], float]]:
        weights = self._chains.weights
        return zip(self._all, weights + weights, strict=True)

    def blocks(self) -> set[int]:
        return set().union(*self._all)
