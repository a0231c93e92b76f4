"""Which chains of prompts go on, learnt from those that did."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

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
