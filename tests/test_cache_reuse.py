"""Check the learned order of eviction: values by class and age, and the KV that states need, by brute force."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.cache.retention import AGES, FIRST_AGE, GROWTH, Chains, Kind, Needs, Record, Reuse, Turn, age_of
from mambacache.config import CacheConfig


def tree(random: Random) -> list[list[bytes]]:
    """Return chains that share beginnings."""
    chains = [[b"root"]]
    for name in range(12):
        start = random.choice(chains)
        kept = start[: random.randint(1, len(start))]
        chains.append([*kept, *(b"%d %d" % (name, depth) for depth in range(random.randint(1, 6)))])
    return chains[1:]


def expected(states: set[tuple[bytes, ...]]) -> dict[bytes, int]:
    """Count the states that need each block and stand above no other state."""
    counts: dict[bytes, int] = {}
    for state in states:
        for block in reversed(state[1:]):
            if block != state[-1] and any(other[-1] == block for other in states):
                break
            counts[block] = counts.get(block, 0) + 1
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_needs_follow_from_the_set_of_states(seed: int) -> None:
    random = Random(seed)
    chains, needed, leaves = tree(random), set[bytes](), dict[bytes, bool]()

    def change(block: bytes, on: bool) -> None:
        assert (block in needed) != on
        (needed.add if on else needed.remove)(block)

    needs, states = Needs(change, lambda state, leaf: leaves.update({state: leaf})), set[tuple[bytes, ...]]()
    for _ in range(60):
        chain = random.choice(chains)
        depth = random.randint(1, len(chain) - 1)
        state = tuple(chain[: depth + 1])
        if state in states:
            states.remove(state)
            needs.remove(chain, depth)
        else:
            leaves[state[-1]] = not needs.has_below(state[-1])
            states.add(state)
            needs.add(chain, depth)
        assert needs.counts == expected(states) and needed == needs.counts.keys()
        for each in states:
            assert leaves[each[-1]] == (not any(each[-1] in other[:-1] for other in states))
            assert (
                needs.above(each, len(each) - 1)
                == len(each) - 1 - needs.gain(each, len(each) - 1)
                == max((d for d in range(1, len(each) - 1) if tuple(each[: d + 1]) in states), default=0)
            )


class Watched(list[bytes]):
    """Counts how often a hash is read."""

    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)


def test_a_gain_reads_one_hash_however_deep_the_chain() -> None:
    """Also after a state came between two others, here and elsewhere."""
    needs = Needs(lambda *_: None, lambda *_: None)
    chains = [Watched([b"root", *(b"%d %d" % (name, depth) for depth in range(4000))]) for name in range(2)]
    for chain in chains:
        needs.add(chain, 4000)
    for depth, above in ((2000, 2000), (3000, 3000), (1000, 3000)):
        needs.add(chains[0], depth)
        for chain in chains:
            chain.reads = 0
        assert [needs.gain(chain, 4000) for chain in chains] == [4000 - above, 4000]
        assert [chain.reads for chain in chains] == [1, 1]


class Counted(dict[bytes, Any]):
    """Counts its reads."""

    reads = 0

    def __getitem__(self, name: bytes) -> Any:
        self.reads += 1
        return super().__getitem__(name)


def test_a_state_between_two_others_reads_no_state_of_other_chains() -> None:
    needs = Needs(lambda *_: None, lambda *_: None)
    for name in range(1000):
        needs.add([b"root", *(b"%d %d" % (name, depth) for depth in range(1, 4))], 3)
    needs._states = counted = Counted(needs._states)
    needs.add([b"root", b"7 1", b"7 2"], 2)
    assert counted.reads < 10 and needs.gain([b"root", b"7 1", b"7 2", b"7 3"], 3) == 1


def test_ages_grow_without_gaps() -> None:
    ends = [FIRST_AGE * GROWTH**age for age in range(AGES)]
    assert age_of(0) == 0 and age_of(1e30) == AGES - 1
    assert all(age_of(end * 0.999) == age and age_of(end * 1.001) == age + 1 for age, end in enumerate(ends[:-1]))


def learn(reuse: Reuse, turn: Turn, reused: bool, names: Sequence[bytes], gap: int) -> None:
    for name in names:
        reuse.begin(name, Kind.TURN, turn)
        reuse.now += gap
        reuse.admitted()
        if reused:
            reuse.reused(name)


def value(reuse: Reuse, turn: Turn, age: int) -> float:
    return reuse.values[Record(Kind.TURN, turn, 0).place][age]


def test_a_class_that_is_reused_is_worth_more() -> None:
    reuse, often, never = Reuse(), Turn(1, number=1), Turn(1)
    for i in range(100):
        learn(reuse, often, True, [b"o%d" % i], 100)
        learn(reuse, never, False, [b"n%d" % i], 100)
    assert value(reuse, often, 0) > 10 * value(reuse, never, 0)
    late = age_of(2000)
    assert value(reuse, often, 0) > value(reuse, often, late)


def test_a_new_class_is_expected_to_behave_like_classes_with_the_same_traits() -> None:
    reuse = Reuse()
    for i in range(100):
        for number in (0, 4):
            learn(reuse, Turn(1, number), number > 0, [b"%d %d" % (number, i)], 100)
    assert value(reuse, Turn(1, 5, added=2), 0) > 10 * value(reuse, Turn(1, 0, added=2), 0)


def test_hits_of_a_class_outweigh_its_traits() -> None:
    reuse = Reuse()
    for i in range(200):
        for number, added in product((0, 4), (0, 2)):
            reused = (number > 0) == (added > 0)
            learn(reuse, Turn(1, number, added=added), reused, [b"%d %d %d" % (number, added, i)], 100)
    for number in (0, 4):
        often, seldom = (value(reuse, Turn(1, number, added=2 * (same == (number > 0))), 0) for same in (True, False))
        assert often > 3 * seldom


def test_factors_of_a_trait_differ_by_age() -> None:
    """Reuse turns with turns before them soon, and others late, equally often."""
    reuse, late = Reuse(), age_of(1500)
    for i in range(300):
        learn(reuse, Turn(1, 1), True, [b"soon %d" % i], 10)
        learn(reuse, Turn(1, 0), True, [b"late %d" % i], 1500)
    soon_first = value(reuse, Turn(1, 1, added=2), 0) / value(reuse, Turn(1, 0, added=2), 0)
    late_first = value(reuse, Turn(1, 1, added=2), late) / value(reuse, Turn(1, 0, added=2), late)
    assert soon_first > 3 * late_first


def test_a_value_is_the_most_hits_for_each_block_of_time() -> None:
    """Compute the index of all ages from its definition."""
    reuse, random = Reuse(), np.random.default_rng(0)
    rates = 10 ** random.uniform(-6, -2, reuse._hits.shape)
    reuse._hits, reuse._time = rates * 1e12, np.full(rates.shape, 1e12)
    values, edges = np.array(reuse.values), [0.0, *(FIRST_AGE * GROWTH**age for age in range(AGES))]
    for age in range(0, AGES, 3):
        widths, unused, stay, best = np.diff(edges[age:]), 1.0, 0.0, 0.0
        widths[0] = edges[age + 1] - (max(edges[age], 1) * edges[age + 1]) ** 0.5
        for width, rate in zip(widths, rates[5, age:], strict=True):
            used = unused * -np.expm1(-rate * width)
            stay += used / rate
            unused -= used
            best = max(best, (1 - unused) / stay)
        assert values[5, age] == pytest.approx(best, rel=1e-5)


def test_a_chain_that_came_back_soon_is_expected_back_soon() -> None:
    """Some chats go on each 100 blocks, and others each 3,000."""
    chains, turns = Chains(64, 1000), dict[tuple[int, int], Turn]()
    prompts = [
        (chat * apart + turn * gap, gap, chat, turn)
        for gap, chats, apart in ((100, 160, 250), (3000, 50, 500))
        for chat in range(chats)
        for turn in range(6)
    ]
    for time, gap, chat, turn in sorted(prompts):
        chains.now = time
        chain = [b"root", *(b"%d %d %d" % (gap, chat, depth) for depth in range(1, 10 * turn + 11))]
        turns[gap, chat] = chains.begin(chain, 10 * turn, 10 * turn, 64 * len(chain) - 63)
        chains.reuse.begin(chain[-1], Kind.TURN, turns[gap, chat])
    soon, late = turns[100, 159], turns[3000, 49]
    first, second = (chains.reuse.values[Record(Kind.TURN, turn, 0, turn.pace).place][0] for turn in (soon, late))
    assert soon.pace < late.pace and first > 3 * second


def test_time_counts_before_an_age_ends() -> None:
    reuse, turn, age = Reuse(), Turn(1), 15
    for i in range(2000):
        reuse.begin(b"%d" % i, Kind.TURN, turn)
    end = FIRST_AGE * GROWTH**age
    reuse.now = int(0.99 * end)
    for i in range(50):
        reuse.reused(b"%d" % i)
    found = []
    for now in (int(end) - 1, int(end) + 1):
        reuse.now = now
        for _ in range(Reuse.EVERY):
            reuse.admitted()
        found.append(value(reuse, turn, age))
    assert found[0] == pytest.approx(found[1], rel=0.05)


def test_counts_of_ages_agree_with_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reuse, "MOST", 40)
    turns = [Turn(1), *(Turn(1, *past) for past in product((1, 9), (False, True)))]
    reuse, random = Reuse(), Random(0)
    for _ in range(3000):
        name = random.choice((b"%d" % random.randrange(1000), *list(reuse.records)[:1]))
        if name in reuse.records and random.random() < 0.3:
            reuse.reused(name)
        else:
            reuse.begin(name, random.choice([*Kind]), random.choice(turns))
        reuse.now += random.choice((0, 1, 50, 10**4, 10**4 if random.random() < 0.95 else 10**7))
        reuse.admitted()
    expected = np.zeros_like(reuse._inside)
    for record in reuse.records.values():
        expected[:, record.place, record.age] += 1, record.used
    assert (expected == reuse._inside).all()
    values = np.array(reuse.values)
    assert np.isfinite(values).all() and (values > 0).all()


def test_a_forgotten_record_keeps_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reuse, "MOST", 40)
    reuse = Reuse()
    for number in range(400):
        reuse.begin(b"%d" % number, Kind.TURN, Turn(1))
        reuse.now += 10
        reuse.admitted()
    kept = reuse._time.sum() + sum(reuse.now - record.used for record in reuse.records.values())
    assert kept == pytest.approx(360 * 400 + 40 * 41 / 2 * 10, rel=0.02)  # a count fades by up to 2.4 %


def test_an_evicted_state_counts_as_reused_and_a_reused_state_starts_anew() -> None:
    reuse, turn = Reuse(), Turn(1)
    reuse.begin(b"a", Kind.TURN, turn)
    reuse.now = 50
    reuse.reused(b"a")
    record = reuse.records[b"a"]
    assert (record.used, record.uses, record.age) == (50, 1, 0)


def test_a_mark_makes_a_branch_of_a_turn_and_a_turn_leaves_a_branch() -> None:
    reuse = Reuse()
    for kind, expects in ((Kind.TURN, Kind.TURN), (Kind.BRANCH, Kind.BRANCH), (Kind.TURN, Kind.BRANCH)):
        reuse.begin(b"a", kind, Turn(1))
        assert reuse.records[b"a"].kind is expects


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reuse, "MOST", 10)
    monkeypatch.setattr(Reuse, "EVERY", 1)
    reuse = Reuse()
    for i in range(30):
        reuse.begin(b"%d" % i, Kind.TURN, Turn(1))
        reuse.now += 1000
        reuse.admitted()
    assert list(reuse.records) == [b"%d" % i for i in range(20, 30)]


def test_entries_of_records_are_bounded_while_no_block_is_computed() -> None:
    """An entry waits behind an older entry until that ages, and each reuse adds an entry."""
    reuse = Reuse()
    for name in (b"waits", b"again"):
        reuse.begin(name, Kind.TURN, Turn(1))
    for _ in range(5000):
        reuse.admitted()
        reuse.reused(b"again")
    assert sum(map(len, reuse._by_age)) < 300


def served(cache: PrefixCache, prompt: list[int], count: int = 1) -> int:
    """Run a prompt alone, and return its hit."""
    cache.add("a", prompt)
    hit = cache.admit("a").num_tokens  # type: ignore[union-attr]
    for number in range(count):
        row = cache.allocate("a", cache.next_tokens("a", 10**6))
        assert row is not None
        planned = cache.plan_rows([row])
        cache.issued(planned)
        cache.accept(planned, {"a": [number]})
    cache.free("a", finished=True)
    cache.check()
    return hit


def test_kv_without_a_state_is_evicted_before_older_kv_that_a_state_needs() -> None:
    cache = PrefixCache(CacheConfig(num_state_blocks=8, num_kv_blocks=9))  # two prompts of four blocks, and a page
    older, later, other = ([name * 1000 + i for i in range(300)] for name in range(3))
    assert [served(cache, prompt) for prompt in (older, later)] == [0, 0]
    cache.add("look", later)
    state = cache._admission.requests["look"].chain[4]
    cache.free("look", finished=False)
    cache._admission.pool.drop(state)
    assert served(cache, other) == 0
    assert served(cache, older) == 256


def test_time_counts_each_computed_block_once() -> None:
    cache = PrefixCache(CacheConfig(num_state_blocks=8, num_kv_blocks=9))
    assert served(cache, list(range(300)), count=30) == 0
    assert cache._admission.chains.now == (300 + 29) // 64
