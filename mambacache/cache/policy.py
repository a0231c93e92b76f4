"""Every choice: which states to write, which to give up, whom to wait for, and what is evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import merge
from itertools import islice
from math import inf

BRANCHING = 0.1
"""Of turns that go on from a prompt, the share of second ones above which its state is kept after the first."""


USEFUL = 0.05
"""Of what its next turn may hit, the share that a second state of a request must add to be kept like the first."""


class Wish(IntEnum):
    """Why a state at a boundary is worth a block; the lower, the sooner it is served."""

    PROMISED = 0  # a waiting request will resume there
    TAIL = 1  # the prompt's last boundary: an identical prompt resumes there
    JUNCTION = 2  # the prompt leaves there what others computed
    MARKED = 3  # the caller named it
    INTERVAL = 4


class Policy:
    """What is stored. Positions are in tokens and multiples of `block_size`.

    Asked-for states (every `Wish` but INTERVAL) may evict anything without references; others take free and cold blocks
    only. Hot, and so evicted after the others, are the asked-for ones, but a tail only in a chain that went on before.

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
    def may_evict_hot(wish: Wish | None) -> bool:
        """Whether a state may evict hot ones to get its block."""
        return wish is not None and wish is not Wish.INTERVAL

    def hot(self, wish: Wish | None, proven: bool) -> bool:
        """Whether a state is kept among the hot ones."""
        return self.may_evict_hot(wish) and (proven or wish is not Wish.TAIL)

    def gives_up(self, wishes: Mapping[int, Wish], position: int, prefill_end: int) -> bool:
        """Whether a state at the end of a step is given up once the request's next one is committed: in an answer, only
        the last boundary is of use to the next turn."""
        return position > prefill_end and self.wish(wishes, position) is None


@dataclass(slots=True)
class End:
    """Of a prompt that was admitted at this time."""

    admitted: int
    proven: bool
    gone_on: bool = False  # a later prompt begins with it
    answered: int = 0  # blocks of prompt and answer together


class Chains:
    """Which chains go on: most prompts are never continued, and those that were are likely to be again.

    A prompt that begins where an earlier one ended, and adds little, proves its chain. Time is counted in blocks that
    were computed.

    Args:
        block_size: tokens in a block.
        blocks: what the cache holds: half of it is the first guess of the time after which chains go on.
    """

    MOST_ENDS = 1 << 16
    LONGEST_ANSWER = 64  # blocks, between a prompt's tail and what the next turn shares
    LONGEST_TURN = 1024  # tokens that a next turn adds
    MEMORY = 64  # turns over which averages forget

    def __init__(self, block_size: int, blocks: int) -> None:
        self._block_size = block_size
        self.now = 0
        self.mean_gap = blocks / 2
        self._answers_kept = 0.5  # how often a next turn shares the answer too, and not the prompt alone
        self._begun, self._gone_on = [8, 8], [2, 6]  # prompts of chains unproven and proven; with a first guess
        self._turns = 0
        self._branches = 0.0  # how often a chain goes on from a prompt that it went on from before
        self._ends: OrderedDict[bytes, tuple[int, bool]] = (
            OrderedDict()
        )  # tails: when admitted, and whether gone on from

    def begin(self, chain: Sequence[bytes], shared: int, prompt_len: int) -> tuple[bool, int]:
        """A prompt is admitted of whose chain so many blocks were ever computed.

        Returns:
            Whether the chain is proven, and after how many blocks the prompt ended that it goes on from (0: none).
        """
        tail = (prompt_len - 1) // self._block_size
        start = next((d for d in range(shared, max(shared - self.LONGEST_ANSWER, 0), -1) if chain[d] in self._ends), 0)
        if start:
            self._turns += 1
            weight, end = 1 / min(self._turns + 1, self.MEMORY), self._ends[chain[start]]
            self._branches += (end.gone_on - self._branches) * weight
            if not end.gone_on:
                self._gone_on[end.proven] += 1
                self.mean_gap += (self.now - end.admitted - self.mean_gap) * weight
            if end.answered > start:
                self._answers_kept += ((shared >= end.answered) - self._answers_kept) * weight
            end.gone_on = True
        proven = start > 0 and prompt_len - shared * self._block_size <= self.LONGEST_TURN + self._block_size
        self._ends[chain[tail]] = End(self.now, proven)
        self._begun[proven] += 1
        self._ends.move_to_end(chain[tail])
        if len(self._ends) > self.MOST_ENDS:
            self._ends.popitem(last=False)
        return proven, start

    def finish(self, chain: Sequence[bytes], tail: int, end: int) -> list[int]:
        """A request ends whose prompt and answer have states after so many blocks; which of them are of no use.

        The next turn resumes at the end of the answer, or at the prompt's tail where the answer was edited, or is asked
        for once more.
        """
        if (noted := self._ends.get(chain[tail])) is not None:
            noted.answered = end
        kept = self._answers_kept
        if kept * end > tail:
            return [tail] if (1 - kept) * tail < USEFUL * end else []
        return [end] if kept * (end - tail) < USEFUL * end else []

    @property
    def odds(self) -> float:
        """How many times as likely as an unproven chain a proven one is to go on."""
        unproven, proven = (gone_on / begun for gone_on, begun in zip(self._gone_on, self._begun, strict=True))
        return max(proven / unproven, 1.0)

    @property
    def branching(self) -> bool:
        """Whether the end of a prompt is of use after a chain went on from it."""
        return self._branches > BRANCHING


class EvictionOrder:
    """Which block goes first: cold ones (nobody asked for them) before hot ones, each least recently used first.

    But a hot block goes before the cold ones when it was not used for so many times longer than they as proven chains are
    likelier to go on, the mean time after which chains do added to both: its chain is dead.
    """

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._cold: OrderedDict[int, float] = OrderedDict()  # block -> when it was used last
        self._hot: OrderedDict[int, float] = OrderedDict()
        self._copied: dict[bool, OrderedDict[int, float]] = {False: OrderedDict(), True: OrderedDict()}  # by hot

    def __len__(self) -> int:
        return len(self._cold) + len(self._hot) + len(self._copied[False]) + len(self._copied[True])

    def add(self, block: int, hot: bool) -> None:
        """A block that was used just now."""
        (self._hot if hot else self._cold)[block] = self._chains.now

    def put_first(self, block: int) -> None:
        """A cold block that is of no use to anyone."""
        self._cold[block] = -inf
        self._cold.move_to_end(block, last=False)

    def put_back(self, block: int, hot: bool, used: float) -> None:
        """A block that `remove` gave with the time when it was used last, and that was not used meanwhile: it goes when
        it would have gone. Blocks come back in the order in which they were removed."""
        self._copied[hot][block] = used

    def remove(self, block: int, hot: bool) -> float:
        """Gives the time when the block was used last."""
        order = self._hot if hot else self._cold
        return (order if block in order else self._copied[hot]).pop(block)

    def first(self, cold_only: bool) -> int | None:
        """The block to evict; None if there is none, or only hot ones with `cold_only`."""
        cold = next(self._in_order(False), None)
        hot = None if cold_only else next(self._in_order(True), None)
        if cold is None or hot is None:
            found = cold or hot
            return found[0] if found is not None else None
        now, gap = self._chains.now, self._chains.mean_gap
        dead = now - hot[1] + gap > self._chains.odds * (now - cold[1] + gap)
        return hot[0] if dead else cold[0]

    def coldest(self, count: int) -> list[int]:
        """So many blocks that go first if cold ones do, and as many if hot ones do; not those of no use to anyone."""
        orders = self._in_order(False), self._in_order(True)
        return [block for order in orders for block, used in islice(order, count) if used > -inf]

    def _in_order(self, hot: bool) -> Iterator[tuple[int, float]]:
        """Hot or cold blocks with the time when they were used last, the first to go first."""
        copied, others = self._copied[hot], self._hot if hot else self._cold
        if not copied:
            return iter(others.items())
        return merge(copied.items(), others.items(), key=lambda entry: entry[1])

    def blocks(self) -> set[int]:
        return {*self._cold, *self._hot, *self._copied[False], *self._copied[True]}
