"""Decide which states to store and evict."""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from heapq import nsmallest
from math import ceil, inf, log, log2, prod
from random import Random

import numpy as np

from mambacache.config import KV_TOKENS_PER_STATE

BRANCHING = 0.1
"""Chains branch if more than this share of next turns continue a continued turn."""

SPARE, NEEDED = 0, 1
"""Groups of unneeded blocks, and of pages that a state needs."""

LONG = KV_TOKENS_PER_STATE
"""An unrequested state of a prompt competes if it saves as many tokens."""


class Kind(IntEnum):
    TURN = 0  # a turn's last state
    TAIL = 1  # a prompt's last state, before a state of its answer
    BRANCH = 2  # junctions, marks, promised states
    STEP = 3  # unrequested, saves `LONG` tokens of a prompt


TURNS = (1, 2, 4, 8)  # bounds of the turns before a turn
ADDED = (320, 1088, 4160)  # tokens between prompts that add little or much
MOST_USES = 2
PACES = (-1.5, -0.5, 0.5)  # the last gap between uses against the usual gap, in powers of two

TRAITS = (len(Kind), 2 * len(TURNS) + 1, len(ADDED) + 1, MOST_USES + 1, len(PACES) + 2)
"""Counts the values of each trait: kind, past, added tokens, uses, pace."""

AGES, SPAN = 28, 4  # a factor holds for a span of ages
FIRST_AGE, GROWTH = 8.0, 1.6  # blocks; each age's end over the last's

_EDGES = np.array([0.0, *(FIRST_AGE * GROWTH**age for age in range(AGES))])
_WIDTHS = np.diff(_EDGES)
_RESTS = _EDGES[1:] - np.sqrt(np.maximum(_EDGES[:-1], 1) * _EDGES[1:])
MOST_EXPONENT = 600.0  # its exp is finite
_LOG_GROWTH = log(GROWTH)


def age_of(blocks: float) -> int:
    return min(int(log(blocks / FIRST_AGE) / _LOG_GROWTH) + 1, AGES - 1) if blocks >= FIRST_AGE else 0


@dataclass(slots=True)
class Turn:
    """Describes a prompt and its answer; depths are in blocks."""

    tail: int
    number: int = 0  # in its chain
    branched: bool = False  # continues a turn that was continued before
    added: int = 0  # bounds of ADDED that its new tokens reach
    at_end: bool = False  # the computed prefix ends with that turn
    answered: int = 0
    gone_on: bool = False  # a later turn continues it
    begun: int = 0  # time
    pace: int = 0  # bounds of PACES passed, plus 1; 0 for a first turn

    @property
    def past(self) -> int:
        return bisect(TURNS, self.number) + len(TURNS) * self.branched


@dataclass(slots=True)
class Record:
    """Follows a state from its last use on, evicted or not."""

    kind: Kind
    turn: Turn
    used: int  # time
    pace: int = 0
    uses: int = 0
    age: int = 0

    @property
    def place(self) -> int:
        _, pasts, added, uses, paces = TRAITS
        place = (self.kind * pasts + self.turn.past) * added + self.turn.added
        return (place * uses + self.uses) * paces + self.pace


class Average:
    FIRST, MEMORY = 8, 64

    def __init__(self, guess: float) -> None:
        self.value = guess
        self._count = self.FIRST

    @property
    def outweighs_guess(self) -> bool:
        return self._count >= 2 * self.FIRST

    def note(self, value: float) -> None:
        self._count = min(self._count + 1, self.MEMORY)
        self.value += (value - self.value) / self._count


class Reuse:
    """Learns how soon states of a class are reused, at each age.

    A class's rate is the usual rate times its traits' factors (proportional hazards), or with many hits its own rate.
    Pace comes last, since few classes have hits of every pace.
    A value is a Gittins index: the most hits for each block of time that the state is kept.
    """

    MOST = 1 << 16
    EVERY = 64  # admissions between two estimates
    MEMORY = 1 << 14  # admissions until a count is 1 / e
    TRUST = 3.0  # expected hits that weigh as much as own hits
    GUESS = 0.02  # hits of an age before any is seen

    def __init__(self) -> None:
        self.now = 0  # computed blocks
        self.records: OrderedDict[bytes, Record] = OrderedDict()
        self._by_age: list[deque[tuple[bytes, Record]]] = [deque() for _ in range(AGES)]
        self._hits, self._time = np.zeros((prod(TRAITS), AGES)), np.zeros((prod(TRAITS), AGES))
        self._inside = np.zeros((2, *self._hits.shape))  # an age's records, and sums of their last uses
        self._factors = [np.ones(AGES)] * (len(TRAITS) - 1)  # by trait but pace, value and age
        self._usual_gap = Average(log2(FIRST_AGE))
        self._admitted = 0
        self._values: list[list[float]] = []
        self._due = True  # for another estimate

    def begin(self, block_hash: bytes, kind: Kind, turn: Turn) -> None:
        if block_hash not in self.records:
            self._follow(block_hash, Record(kind, turn, self.now, turn.pace))
        elif kind is Kind.BRANCH:
            record = self.records[block_hash]
            self._count(record, -1)
            record.kind = kind
            self._count(record, 1)

    def _follow(self, block_hash: bytes, record: Record) -> None:
        self.records[block_hash] = record
        self._by_age[0].append((block_hash, record))
        self._count(record, 1)
        if len(self.records) > self.MOST:
            self._leave(self.records.popitem(last=False)[1])

    def _count(self, record: Record, more: int) -> None:
        self._inside[:, record.place, record.age] += more, more * record.used

    def _grow(self, record: Record) -> None:
        self._count(record, -1)
        self._time[record.place, record.age] += _WIDTHS[record.age]
        record.age += 1
        if record.age < AGES:
            self._count(record, 1)

    def _leave(self, record: Record) -> None:
        while record.age < AGES - 1 and self.now - record.used >= _EDGES[record.age + 1]:
            self._grow(record)
        self._count(record, -1)
        self._time[record.place, record.age] += max(self.now - record.used - _EDGES[record.age], 0)

    def reused(self, block_hash: bytes) -> None:
        """Note that a prompt would resume there if the state were cached."""
        record = self.records.pop(block_hash)
        self._leave(record)
        self._hits[record.place, record.age] += 1
        uses = min(record.uses + 1, MOST_USES)
        pace = self._pace(self.now - record.used)
        self._follow(block_hash, Record(record.kind, record.turn, self.now, pace, uses))

    def went_on(self, gap: int) -> int:
        """Note the time since a chain's last turn; return its pace."""
        self._usual_gap.note(log2(max(gap, 1)))
        return self._pace(gap)

    def _pace(self, gap: int) -> int:
        return 1 + bisect(PACES, log2(max(gap, 1)) - self._usual_gap.value)

    def admitted(self) -> None:
        self._admitted += 1
        if self._admitted % self.EVERY:
            return
        self._due = True
        self._hits *= 1 - self.EVERY / self.MEMORY
        self._time *= 1 - self.EVERY / self.MEMORY
        for age, line in enumerate(self._by_age):
            while line:
                block_hash, record = line[0]
                if self.records.get(block_hash) is record:
                    if self.now - record.used < _EDGES[age + 1]:
                        break
                    self._grow(record)
                    if record.age < AGES:
                        self._by_age[age + 1].append((block_hash, record))
                    else:
                        del self.records[block_hash]
                line.popleft()
        if sum(map(len, self._by_age)) > 2 * (len(self.records) + self.EVERY):  # age stands still
            live = self.records.get
            self._by_age = [deque(each for each in line if live(each[0]) is each[1]) for line in self._by_age]

    @property
    def values(self) -> list[list[float]]:
        if self._due:
            self._due = False
            self._values = self._estimate()
        return self._values

    def _estimate(self) -> list[list[float]]:
        inside, used = self._inside
        passed = self._time + np.maximum(inside * (self.now - _EDGES[:-1]) - used, 0)
        rates = np.ascontiguousarray(self._rates(passed).T)  # ages first
        expected = np.cumsum(rates * _WIDTHS[:, None], 0)
        unused = np.exp(-np.minimum(expected, MOST_EXPONENT))  # to an age's end
        rest = np.exp(-rates * _RESTS[:, None])  # from an age's middle to its end
        first, then = (1 - rest) / rates, rest / unused
        stays = -np.diff(unused, axis=0, prepend=1) / rates
        later = np.cumsum(stays[::-1], 0)[::-1] - stays  # in higher ages
        values = np.empty_like(rates)
        for age in range(AGES):
            stay = later[age] - later[age:]
            stay *= then[age]
            stay += first[age]
            hit = unused[age:] * -then[age]
            hit += 1
            hit /= stay
            values[age] = hit.max(0)
        return values.T.tolist()

    def _rates(self, passed: np.ndarray) -> np.ndarray:
        """Return the rates [classes, ages]."""
        hits, time = (each.reshape(-1, TRAITS[-1], AGES) for each in (self._hits, passed))
        plain_hits, plain_time = hits.sum(1), time.sum(1)  # without pace
        plain = self._learned(plain_hits, plain_time, self._of_traits(plain_hits, plain_time))[:, None]
        factors = self._learned_factors(hits.sum(0), (time * plain).sum(0))
        return self._learned(hits, time, plain * factors).reshape(-1, AGES)

    def _learned(self, hits: np.ndarray, time: np.ndarray, guess: np.ndarray) -> np.ndarray:
        return (hits + self.TRUST) / (time + self.TRUST / guess)

    def _learned_factors(self, hits: np.ndarray, expected: np.ndarray) -> np.ndarray:
        seen, expected = (np.add.reduceat(each, range(0, AGES, SPAN), -1) for each in (hits, expected))
        return ((seen + self.TRUST) / (expected + self.TRUST)).repeat(SPAN, -1)

    def _of_traits(self, hits: np.ndarray, passed: np.ndarray) -> np.ndarray:
        """Learn the factors, and return the rates [classes without pace, ages]."""
        hits, time = (each.reshape(*TRAITS[:-1], AGES) for each in (hits, passed))
        traits, product = range(len(self._factors)), prod(self._factors)
        seen, expected = hits.sum((*traits,)), (time * product).sum((*traits,))
        usual, last = np.empty(AGES), 1e-7  # of all classes
        for age in range(AGES):
            last = usual[age] = (seen[age] + self.GUESS) / (expected[age] + 2 * self.GUESS / last)
        for trait, factors in enumerate(self._factors):
            others = (*(other for other in traits if other != trait),)
            seen, expected = (each.sum(others, keepdims=True) for each in (hits, time * usual * product / factors))
            self._factors[trait] = self._learned_factors(seen, expected)
            product = product * (self._factors[trait] / factors)
        return (product * usual).reshape(-1, AGES)

    def group(self, record: Record) -> int:
        return 2 + 2 * record.place


class Chains:
    """Tracks which chains go on: a computed prefix that ends near a turn continues it."""

    MOST_TURNS = 1 << 16
    LONGEST_ANSWER = 64  # blocks

    def __init__(self, block_size: int, blocks: int) -> None:
        self._block_size = block_size
        self.blocks = blocks
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()  # by tail hash
        self.reuse = Reuse()
        self._branches = Average(0)

    @property
    def now(self) -> int:
        return self.reuse.now

    @now.setter
    def now(self, now: int) -> None:
        self.reuse.now = now

    def begin(self, chain: Sequence[bytes], hit: int, junction: int, prompt_len: int) -> Turn:
        """Record an admission after `hit` or `junction` computed blocks."""
        shared = max(hit, junction)
        tail = (prompt_len - 1) // self._block_size
        reach = range(shared, max(shared - self.LONGEST_ANSWER, 0), -1)
        self.reuse.admitted()
        depths, records = range(shared, max(hit, 1) - 1, -1), self.reuse.records
        if deepest := next((depth for depth in depths if chain[depth] in records), 0):
            self.reuse.reused(chain[deepest])
        before = next((depth for depth in reach if chain[depth] in self._turns), 0)
        turn = Turn(tail, begun=self.now, added=bisect(ADDED, prompt_len - shared * self._block_size))
        if before:
            last = self._turns[chain[before]]
            turn.number, turn.branched = last.number + 1, last.gone_on
            turn.pace = self.reuse.went_on(self.now - last.begun)
            self._branches.note(last.gone_on)
            last.gone_on = True
            turn.at_end = shared in (before, last.answered)
        self._remember(chain[tail], turn)
        return turn

    def _remember(self, tail_hash: bytes, turn: Turn) -> None:
        replaced = self._turns.pop(tail_hash, None)
        self._turns[tail_hash] = turn
        if replaced is None and len(self._turns) > self.MOST_TURNS:
            self._turns.popitem(last=False)

    @property
    def go_on(self) -> bool:
        return self._branches.outweighs_guess

    @property
    def branching(self) -> bool:
        return self._branches.value > BRANCHING


@dataclass(slots=True)
class StatePlace:
    chain: Sequence[bytes]
    depth: int
    above: int  # depth of the state above
    below: set[bytes]  # states right below


class Needs:
    """Counts the states that need the KV of a block: the nearest below it."""

    def __init__(self, on_change: Callable[[bytes, bool], None], on_leaf: Callable[[bytes, bool], None]) -> None:
        self._states: dict[bytes, StatePlace] = {}
        self._first: dict[bytes, set[bytes]] = {}  # states without a state above, by first block
        self.counts: dict[bytes, int] = {}
        self._on_change, self._on_leaf = on_change, on_leaf

    def above(self, chain: Sequence[bytes], depth: int) -> int:
        return next((d for d in range(depth - 1, 0, -1) if chain[d] in self._states), 0)

    def group(self, block_hash: bytes) -> int:
        return NEEDED if block_hash in self.counts else SPARE

    def has_below(self, block_hash: bytes) -> bool:
        place = self._states.get(block_hash)
        return bool(place.below) if place is not None else block_hash in self.counts

    def add(self, chain: Sequence[bytes], depth: int) -> None:
        above, state = self.above(chain, depth), chain[depth]
        siblings, below = self._below(chain, above), set[bytes]()
        if state in self.counts:
            below = {e for e in siblings if (at := self._states[e]).depth > depth and at.chain[depth] == state}
        for each in below:
            self._states[each].above = depth
        self._states[state] = StatePlace(chain, depth, above, below)
        self._count(chain, above, depth, 1 - len(below))
        self._replace(chain, above, below, {state})

    def remove(self, chain: Sequence[bytes], depth: int) -> None:
        place = self._states.pop(chain[depth])
        for each in place.below:
            self._states[each].above = place.above
        self._count(chain, place.above, depth, len(place.below) - 1)
        self._replace(chain, place.above, {chain[depth]}, place.below)

    def gain(self, chain: Sequence[bytes], depth: int) -> int:
        return depth - self._states[chain[depth]].above

    def _below(self, chain: Sequence[bytes], above: int) -> set[bytes]:
        return self._states[chain[above]].below if above else self._first.get(chain[1], set())

    def _replace(self, chain: Sequence[bytes], above: int, old: set[bytes], new: set[bytes]) -> None:
        """Replace states right below a state or the root."""
        below = self._below(chain, above)
        before = len(below)
        below -= old
        below |= new
        if above:
            if not before or not below:
                self._on_leaf(chain[above], not below)
        elif below:
            self._first[chain[1]] = below
        else:
            self._first.pop(chain[1], None)

    def _count(self, chain: Sequence[bytes], above: int, depth: int, more: int) -> None:
        if not more:
            return
        counts = self.counts
        for d in range(depth, above, -1):  # deepest first, as pages are evicted
            before = counts.get(chain[d], 0)
            if before + more:
                counts[chain[d]] = before + more
            else:
                del counts[chain[d]]
            if not before or not before + more:
                self._on_change(chain[d], not before)


class Wish(IntEnum):
    """Orders the reasons to store a state, most urgent first."""

    PROMISED = 0  # a waiting request resumes there
    TAIL = 1  # an identical prompt resumes there
    JUNCTION = 2  # end of the computed prefix
    MARKED = 3
    INTERVAL = 4  # also named positions without a mark


MOST_MARKS = 8  # of a request

STATES_PER_MARK = 4
"""Least states for each mark of a salt."""


class Policy:
    """Decides at which token positions to store states."""

    def __init__(self, block_size: int, interval: int, max_checkpoints: int) -> None:
        self._block_size = block_size
        self._interval = interval
        self.max_checkpoints = max_checkpoints

    @property
    def most_marks(self) -> int:
        return max(self.max_checkpoints // STATES_PER_MARK, 1)

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

    def kind(self, wish: Wish | None) -> Kind | None:
        if not self.requested(wish):
            return None
        return Kind.TURN if wish is Wish.TAIL else Kind.BRANCH

    def gives_up(self, wishes: Mapping[int, Wish], position: int, prefill_end: int) -> bool:
        """Tell whether the next commit drops this state inside an answer."""
        return position > prefill_end and self.wish(wishes, position) is None


class Marks:
    """Tracks the latest marks: at most `of_a_salt` per salt, `most` in all."""

    def __init__(self, of_a_salt: int, most: int) -> None:
        self._of_a_salt, self._most, self._count = of_a_salt, most, 0
        self._salts: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()  # oldest first

    def add(self, salt: str, block_hash: bytes) -> bytes | None:
        marks = self._salts.setdefault(salt, OrderedDict())
        self._salts.move_to_end(salt)
        self._count += block_hash not in marks
        marks[block_hash] = None
        marks.move_to_end(block_hash)
        if len(marks) <= self._of_a_salt and self._count <= self._most:
            return None
        oldest = salt if len(marks) > self._of_a_salt else next(iter(self._salts))
        lost, _ = self._salts[oldest].popitem(last=False)
        self._count -= 1
        if not self._salts[oldest]:
            del self._salts[oldest]
        return lost

    def has(self, salt: str, block_hash: bytes) -> bool:
        return block_hash in self._salts.get(salt, ())


SAMPLE, LEAVES = 32, 128
"""Blocks drawn at random: one of SAMPLE is evicted, or to free KV, one of LEAVES."""


class EvictionOrder:
    """Chooses spare blocks, then the coldest: memory / (value x gain).

    Even groups are of states without a state behind them: their eviction frees KV.
    """

    def __init__(self, chains: Chains) -> None:
        self._reuse = chains.reuse
        self.gain: Callable[[int], int] = lambda _: 1  # blocks that a state saves
        self.kv = 0.0  # memory of a block's KV in states, if both share a memory
        self._spare: OrderedDict[int, float] = OrderedDict()  # last use
        self._used: dict[int, tuple[int, float]] = {}  # group and last use
        self._slots: tuple[list[int], list[int]] = ([], [])  # even and odd groups
        self._slot: dict[int, int] = {}
        self._back: set[int] = set()  # blocks that were put back
        self._random = Random(0)

    def __len__(self) -> int:
        return len(self._spare) + len(self._used)

    @property
    def num_spare(self) -> int:
        return len(self._spare)

    def add(self, block: int, group: int) -> None:
        self._insert(block, group, self._reuse.now)

    def put_first(self, block: int) -> None:
        self._spare[block] = -inf
        self._spare.move_to_end(block, last=False)

    def put_back(self, block: int, group: int, used: float) -> None:
        self._insert(block, group, max(used, 0))
        self._back.add(block)

    def move(self, block: int, before: int, group: int) -> None:
        back = block in self._back
        self._insert(block, group, max(self.remove(block, before), 0))
        if back:
            self._back.add(block)

    def _insert(self, block: int, group: int, used: float) -> None:
        if group == SPARE:
            self._spare[block] = used
            return
        slots = self._slots[group % 2]
        self._slot[block] = len(slots)
        slots.append(block)
        self._used[block] = group, used

    def remove(self, block: int, group: int) -> float:
        self._back.discard(block)
        if group == SPARE:
            return self._spare.pop(block)
        slots, slot, last = self._slots[group % 2], self._slot.pop(block), self._slots[group % 2].pop()
        if last != block:
            slots[slot], self._slot[last] = last, slot
        return self._used.pop(block)[1]

    def inherit(self, heir: int, block: int) -> int | None:
        """Return the group, and note the last use, that a state takes from an evicted state worth more."""
        (group, used), (own, _) = self._used[block], self._used[heir]
        if self._late(block) >= self._late(heir):
            return None
        group = group // 2 * 2 + own % 2
        self._used[heir] = group, used
        return group

    def first(self, requested: bool) -> int | None:
        """Return the next victim; unless `requested`, a spare block."""
        if self._spare or not requested:
            return next(iter(self._spare), None)
        return max(self._sample(*self._slots), key=self._cold, default=None)

    def first_leaf(self, frees: Callable[[int], bool]) -> int | None:
        drawn = self._sample(self._slots[0], most=LEAVES)
        return max(filter(frees, drawn), key=self._late, default=None)

    def _sample(self, *lists: list[int], most: int = SAMPLE) -> list[int]:
        total = sum(map(len, lists))
        if total <= most:
            return [block for slots in lists for block in slots]
        draw, first, drawn = self._random.random, lists[0], []
        for _ in range(most):
            place = int(draw() * total)
            drawn.append(first[place] if place < len(first) else lists[1][place - len(first)])
        return drawn

    def _cold(self, block: int) -> float:
        group, used = self._used[block]
        age = self._reuse.now - used
        if group == NEEDED:
            return age
        gain = self.gain(block)
        memory = 1 if group % 2 else 1 + gain * self.kv
        return memory / (self._reuse.values[group // 2 - 1][age_of(age)] * gain)

    def _late(self, block: int) -> float:
        group, used = self._used[block]
        return 1 / self._reuse.values[group // 2 - 1][age_of(self._reuse.now - used)]

    def due(self, share: float, kv_share: float) -> int | None:
        """Return a state, not put back, of the share next to be evicted, or to be evicted for its KV."""
        for key, next_share, lists in ((self._cold, share, self._slots), (self._late, kv_share, self._slots[:1])):
            drawn = sorted(self._sample(*lists), key=key, reverse=True) if next_share > 0 else []
            for block in drawn[: ceil(next_share * len(drawn))]:
                if block not in self._back:
                    return block
        return None

    def in_order(self) -> list[int]:
        return [*self._used, *self._spare]

    def blocks(self) -> set[int]:
        return self._used.keys() | self._spare.keys()
