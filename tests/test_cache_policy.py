"""Compare the policy with plain LRU on traffic of many kinds, and check the statistics that it learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mambacache import CacheConfig, Hit, PrefixCache
from mambacache.cache import pool
from mambacache.cache.retention import Chains, EvictionOrder, Marks, Policy, Rank, Turn, Wish
from policy_mixes import KINDS, Asked, Mixes, ceiling
from selection import some


class LeastRecentlyUsed(EvictionOrder):
    """Ignore ranks."""

    def add(self, block: int, rank: Rank) -> None:
        super().add(block, Rank.SPARE)

    def put_first(self, block: int) -> None:
        self.add(block, Rank.SPARE)

    def remove(self, block: int, rank: Rank) -> None:
        super().remove(block, Rank.SPARE)

    def first(self, requested: bool) -> int | None:
        return next(iter(self._idle[Rank.SPARE]), None)


def hit_tokens(
    traffic: list[Asked], num_states: int, num_pages: int, marks: Callable[[int], Sequence[int]] = lambda number: ()
) -> list[int]:
    """Run the requests one after the other, each with its marks, and return their hit tokens."""
    cache, hits = PrefixCache(CacheConfig(num_states, num_pages, accounting=False)), list[int]()
    for number, (prompt, said) in enumerate(traffic):
        name = str(number)
        cache.add(name, prompt, checkpoint_at=marks(number))
        hit = cache.admit(name)
        assert isinstance(hit, Hit)
        hits.append(hit.num_tokens)
        for token in said:
            planned = ()
            while not (planned and planned[0].samples):
                step = cache.allocate(name, cache.next_tokens(name, 8192))
                assert step is not None
                planned = cache.plan_rows([step])
                cache.issued(planned)
                cache.accept(planned, {name: [token] * planned[0].samples})
        cache.free(name, finished=True)
    cache.check()
    return hits


@pytest.mark.parametrize("kind", some(2, KINDS))
def test_no_traffic_hits_less_than_with_lru(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = list(KINDS[kind](Mixes(seed=1)))
    most = ceiling(traffic)
    for num_states, num_pages in ((12, 300), (50, 1200)):
        with monkeypatch.context() as patch:
            patch.setattr(pool, "EvictionOrder", LeastRecentlyUsed)
            least = sum(hit_tokens(traffic, num_states, num_pages))
        ours = sum(hit_tokens(traffic, num_states, num_pages))
        assert ours >= least - 0.02 * most, (num_states, ours / most, least / most)


@pytest.mark.parametrize("before", [0, 64])
def test_a_mark_lasts_until_the_next_message_of_a_user(before: int) -> None:
    """Only the first prompt of a round is the beginning of a later prompt.

    Its end is also the tail of the turn before the second request. A mark there, or one block earlier, must last.
    """
    calls = 6
    traffic = list(Mixes(seed=1).rounds(sessions=4, rounds=6, calls=calls))

    def at_end(number: int) -> Sequence[int]:
        return () if number % calls else [(len(traffic[number][0]) - 1) // 64 * 64 - before]

    hits = hit_tokens(traffic, 16, 2000, at_end)[::calls]
    assert sum(hits) >= 0.6 * sum(len(prompt) for prompt, _ in traffic[::calls])


# --- marks ---


def test_the_oldest_mark_of_a_salt_gives_way_to_newer_marks() -> None:
    marks = Marks(of_a_salt=2, most=100)
    for salt, block_hash, rank in (("a", b"1", Rank.FIRST), ("a", b"2", Rank.SPARE), ("b", b"9", Rank.FIRST)):
        assert marks.add(salt, block_hash, rank) is None
    assert marks.add("a", b"1", Rank.LATER) is None
    assert marks.add("a", b"3", Rank.FIRST) == (b"2", Rank.SPARE)
    assert [marks.has("a", each) for each in (b"1", b"2", b"3", b"9")] == [True, False, True, False]
    marks.hit("a", b"1")
    marks.hit("a", b"2")
    assert marks.add("a", b"4", Rank.FIRST) == (b"1", Rank.SECOND) and marks.has("b", b"9")


def test_the_marks_of_all_salts_are_bounded() -> None:
    marks = Marks(of_a_salt=4, most=16)
    for salt in range(1000):
        for each in range(6):
            marks.add(str(salt), bytes([each]), Rank.FIRST)
    assert sum(len(each) for each in marks._salts.values()) == marks._count == 16
    assert list(marks._salts) == ["996", "997", "998", "999"]


def test_named_positions_near_the_end_of_the_prompt_become_marks() -> None:
    named = [0, *range(64, 10_000, 64)]
    assert Policy(64, 0, 1000).marks(named, 1000) == {*range(768, 1217, 64)}
    assert Policy(64, 0, 8).marks(named, 1000) == {960, 1024}
    assert Policy(64, 0, 1000).marks([64, 64, 0, 9000], 1000) == {64, 9000}
    wishes = Policy(64, 0, 8).wishes([64, 128, 6400, 9600], {128, 9600}, 0, (200,))
    assert wishes == {64: Wish.INTERVAL, 128: Wish.MARKED, 9600: Wish.MARKED, 192: Wish.TAIL}


# --- learnt statistics ---


def chain_of(*names: int) -> list[bytes]:
    return [name.to_bytes(4, "big") for name in (0, *names)]


def talk(chains: Chains, chat: int, shared: int, blocks: int, answer: int) -> Turn:
    """Add a turn of a chat, in blocks; its answer ends `answer` blocks after its tail."""
    turn = chains.begin(chain_of(*range(1000 * chat + 1, 1000 * chat + 100)), shared, blocks * 64 + 1)
    chains.now += blocks - shared + answer
    turn.answered = blocks + answer
    return turn


def test_a_chain_rises_with_every_short_next_turn() -> None:
    chains = Chains(64, 1000)
    first = talk(chains, 1, shared=0, blocks=10, answer=2)
    assert first.rank is Rank.FIRST and not first.before and not first.at_end
    second = talk(chains, 1, shared=12, blocks=14, answer=2)
    assert second.rank is Rank.SECOND and second.before == 10 and second.at_end and first.gone_on
    edited = talk(chains, 1, shared=14, blocks=16, answer=2)
    assert edited.rank is Rank.THIRD and edited.before == 14 and edited.at_end
    inside = talk(chains, 1, shared=17, blocks=20, answer=2)
    assert inside.rank is Rank.FOURTH and inside.before == 16 and not inside.at_end  # it branches inside the answer
    long = talk(chains, 1, shared=22, blocks=60, answer=0)
    assert long.before == 20 and long.rank is Rank.FIRST
    assert talk(chains, 2, shared=0, blocks=10, answer=2).rank is Rank.FIRST
    for turn in range(9):
        last = talk(chains, 3, shared=10 * turn, blocks=10 * turn + 10, answer=0)
    assert last.rank is Rank.LATER


def test_a_turn_keeps_the_state_that_next_turns_begin_with() -> None:
    for edited, useless in ((False, [10]), (True, [12])):
        chains = Chains(64, 1000)
        last = Turn(tail=10, admitted=0, answered=12)
        assert chains.useless(last, end=12) == []  # nothing is known: both are kept
        for chat in range(200):
            talk(chains, chat, shared=0, blocks=10, answer=2)
            talk(chains, chat, shared=10 if edited else 12, blocks=13, answer=2)
        assert chains.useless(last, end=12) == useless
        assert chains.useless(last, end=10) == []  # no state of the answer


def test_the_state_of_the_turn_before_is_useless_unless_chains_branch() -> None:
    chains = Chains(64, 1000)
    second = Turn(tail=14, admitted=0, before=10)
    assert chains.useless(second, end=14) == [10] and not chains.branching
    for chat in range(20):
        talk(chains, chat, shared=0, blocks=10, answer=2)
        for _ in range(3):
            talk(chains, chat, shared=10, blocks=14, answer=2)
    assert chains.branching and chains.useless(second, end=14) == []


def test_the_odds_follow_traffic_and_forget() -> None:
    chains = Chains(64, 1000)
    before = chains.weights[Rank.SECOND]
    for chat in range(200):
        for turn in range(4):
            talk(chains, chat, shared=12 * turn, blocks=12 * turn + 10, answer=2)
        for other in range(30):
            talk(chains, 10_000 + 30 * chat + other, shared=0, blocks=10, answer=0)
    seldom = chains.weights[Rank.SECOND]
    assert seldom > 3 * before  # one first turn in 31 goes on, and most later turns do
    for chat in range(20_000, 24_000):
        for turn in range(2):
            talk(chains, chat, shared=12 * turn, blocks=12 * turn + 10, answer=2)
    assert chains.weights[Rank.SECOND] < seldom / 3


def test_the_mean_gap_between_turns_is_learnt() -> None:
    chains = Chains(64, 1000)
    assert chains.mean_gap == 500
    for chat in range(500):
        talk(chains, chat, shared=0, blocks=10, answer=0)
        chains.now += 70
        talk(chains, chat, shared=10, blocks=20, answer=0)
    assert chains.mean_gap == pytest.approx(80, rel=0.01)


def test_the_oldest_turns_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chains, "MOST_TURNS", 3)
    chains = Chains(64, 1000)
    for chat in (1, 2, 3, 1, 4):
        talk(chains, chat, shared=0, blocks=10, answer=0)
    assert talk(chains, 1, shared=10, blocks=12, answer=0).before == 10
    assert talk(chains, 2, shared=10, blocks=12, answer=0).before == 0


# --- the order of eviction ---


def order_of(*added: tuple[int, Rank, int], odds: float = 4.0, gap: float = 100, now: int) -> EvictionOrder:
    """Return the eviction order of blocks with these ranks and times of use."""
    chains = Chains(64, 2)
    chains._gap.value, chains.weights = gap, [1, 2, 2 * odds, 0, 0, 0]
    order = EvictionOrder(chains)
    for block, rank, used in added:
        chains.now = used
        order.add(block, rank)
    chains.now = now
    return order


def test_rank_decides_among_young_blocks_and_age_among_old_blocks() -> None:
    blocks = (1, Rank.SECOND, 0), (2, Rank.FIRST, 50), (3, Rank.SPARE, 90)
    assert order_of(*blocks, now=100).first(requested=True) == 3
    assert order_of(*blocks, now=1000).first(requested=True) == 3
    assert order_of(*blocks[:2], now=100).first(requested=True) == 2
    old = (1, Rank.SECOND, 0), (2, Rank.FIRST, 9_900)
    assert order_of(*old, now=10_000).first(requested=True) == 1  # its chain is dead
    assert order_of(now=5).first(requested=True) is None


def test_an_unrequested_block_evicts_old_blocks_only() -> None:
    for rank, spared_until in ((Rank.SPARE, 0), (Rank.FIRST, 100), (Rank.SECOND, 700)):
        for now in range(0, 1000, 50):
            first = order_of((1, rank, 0), now=now).first(requested=False)
            assert (first == 1) == (now >= spared_until), (rank, now)


def test_useless_blocks_are_evicted_first() -> None:
    order = order_of((1, Rank.SPARE, 0), (2, Rank.FIRST, 0), now=10)
    order.put_first(3)
    order.put_first(4)
    assert order.first(requested=False) == 4 and len(order) == 4 and order.blocks() == {1, 2, 3, 4}
    order.remove(4, Rank.SPARE)
    assert order.first(requested=True) == 3
