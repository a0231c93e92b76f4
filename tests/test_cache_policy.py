"""Compare the policy with plain LRU on traffic of many kinds, and check the statistics that it learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mambacache import CacheConfig, Hit, PrefixCache
from mambacache.cache import pool
from mambacache.cache.retention import NEEDED, SPARE, Chains, EvictionOrder, Kind, Marks, Policy, Turn, Wish
from policy_mixes import KINDS, Asked, Mixes, ceiling
from selection import some


class LeastRecentlyUsed(EvictionOrder):
    """Order states by their last use alone."""

    def _cold(self, block: int, within: int = 0) -> float:
        return self._reuse.now - self._used[block][1]

    _late = _cold


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
    for salt, block_hash in (("a", b"1"), ("a", b"2"), ("b", b"9"), ("a", b"1")):
        assert marks.add(salt, block_hash) is None
    assert marks.add("a", b"3") == b"2"
    assert [marks.has("a", each) for each in (b"1", b"2", b"3", b"9")] == [True, False, True, False]
    assert marks.add("a", b"4") == b"1" and marks.has("b", b"9")


def test_the_marks_of_all_salts_are_bounded() -> None:
    marks = Marks(of_a_salt=4, most=16)
    for salt in range(1000):
        for each in range(6):
            marks.add(str(salt), bytes([each]))
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
    turn = chains.begin(chain_of(*range(1000 * chat + 1, 1000 * chat + 100)), shared, 0, blocks * 64 + 1)
    chains.now += blocks - shared + answer
    turn.answered = blocks + answer
    return turn


def test_a_turn_knows_the_chain_that_it_continues() -> None:
    chains = Chains(64, 1000)
    first = talk(chains, 1, shared=0, blocks=10, answer=2)
    assert (first.number, first.branched, first.at_end) == (0, False, False)
    second = talk(chains, 1, shared=12, blocks=14, answer=2)
    assert (second.number, second.branched, second.at_end) == (1, False, True)
    assert first.gone_on and not second.gone_on
    again = talk(chains, 1, shared=11, blocks=13, answer=2)  # inside the answer
    assert (again.number, again.branched, again.at_end) == (1, True, False)
    assert talk(chains, 1, shared=16, blocks=18, answer=0).number == 2


def test_a_prompt_reuses_the_deepest_state_alone_and_a_hit_in_its_place_counts_for_nothing() -> None:
    chains, chain = Chains(64, 1000), chain_of(*range(1, 100))
    records = chains.reuse.records
    for depth in (4, 9):
        chains.reuse.begin(chain[depth], Kind.TURN, Turn(depth))
    for hit, junction, uses in ((0, 3, (0, 0)), (4, 12, (0, 1)), (4, 0, (1, 1)), (9, 0, (1, 2))):
        chains.begin(chain, hit, junction, 20 * 64)
        assert (records[chain[4]].uses, records[chain[9]].uses) == uses


def test_prompts_are_classed_by_their_new_tokens() -> None:
    bounds = [talk(Chains(64, 1000), 1, shared=0, blocks=blocks, answer=0).added for blocks in (1, 5, 17, 65, 90)]
    assert bounds == [0, 1, 2, 3, 3]


def test_turns_are_classed_by_the_turns_before_them() -> None:
    continued, branched = ([Turn(1, number, again).past for number in (1, 2, 3, 4, 8, 99)] for again in (False, True))
    assert Turn(1).past == 0 and continued == [1, 2, 2, 3, 4, 4] and branched == [5, 6, 6, 7, 8, 8]


def test_chains_branch_where_turns_are_continued_again() -> None:
    chains = Chains(64, 1000)
    for chat in range(100, 120):
        for blocks in (10, 14):
            talk(chains, chat, shared=blocks - 10 and 10, blocks=blocks, answer=2)
    assert not chains.branching
    for chat in range(20):
        talk(chains, chat, shared=0, blocks=10, answer=2)
        for _ in range(3):
            talk(chains, chat, shared=10, blocks=14, answer=2)
    assert chains.branching


def test_the_oldest_turns_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chains, "MOST_TURNS", 3)
    chains = Chains(64, 1000)
    for chat in (1, 2, 3, 1, 4):
        talk(chains, chat, shared=0, blocks=10, answer=0)
    assert talk(chains, 1, shared=10, blocks=12, answer=0).number == 1
    assert talk(chains, 2, shared=10, blocks=12, answer=0).number == 0


# --- the order of eviction ---


def order_of(*added: tuple[int, int, int], now: int) -> EvictionOrder:
    """Return the eviction order of blocks with these groups and times of use."""
    chains = Chains(64, 2)
    order = EvictionOrder(chains)
    for block, group, used in added:
        chains.now = used
        order.add(block, group)
    chains.now = now
    return order


def test_without_traffic_the_state_that_saves_least_for_its_age_is_evicted() -> None:
    order = order_of((1, 2, 0), (2, 2, 100), now=200)
    assert order.first(requested=True) == 1
    order.gain = {1: 100, 2: 1}.__getitem__
    assert order.first(requested=True) == 2
    assert order_of(now=5).first(requested=True) is None


def test_in_one_memory_a_state_counts_with_the_kv_that_only_it_needs() -> None:
    order = order_of((1, 3, 0), (2, 2, 0), now=10)
    order.gain = {1: 9, 2: 20}.__getitem__
    assert order.first(requested=True) == 1
    order.kv = 1 / 10
    assert order.first(requested=True) == 2  # 20 blocks saved in 3 times the memory
    order.kv = 1 / 20
    assert order.first(requested=True) == 1


def test_pages_that_states_need_are_evicted_by_age_and_spare_pages_before_them() -> None:
    blocks = (1, NEEDED, 10), (2, NEEDED, 0), (3, SPARE, 20)
    order = order_of(*blocks, now=30)
    assert order.first(requested=True) == order.first(requested=False) == 3
    order.remove(3, SPARE)
    assert order.first(requested=True) == 2 and order.first(requested=False) is None


def test_only_states_without_a_state_behind_them_free_kv() -> None:
    order = order_of((1, 3, 0), (2, 2, 50), (3, 2, 20), now=100)
    assert order.first_leaf(lambda _: True) == 3
    order.move(1, 3, 2)
    assert order.first_leaf(lambda _: True) == 1


def test_a_state_takes_the_group_and_last_use_of_an_evicted_state_that_is_reused_sooner() -> None:
    order = order_of((1, 3, 0), (2, 4, 150), (3, 2, 20), now=200)
    assert order.inherit(1, 2) == 5  # a state stands behind it as before
    assert order.inherit(3, 1) == 4 and order.inherit(1, 3) is None
    order.gain = {1: 1, 2: 1, 3: 2}.__getitem__
    order.remove(2, 4)
    assert order.first(requested=True) == 1 and order.remove(1, 5) == order.remove(3, 4) == 150


def test_states_of_the_shares_next_to_be_evicted_are_due_until_they_are_put_back() -> None:
    order = order_of((1, 3, 0), (2, 2, 100), (3, 2, 20), (4, 2, 180), (5, SPARE, 0), now=200)
    order.gain = {1: 100, 2: 1, 3: 1, 4: 100}.__getitem__
    assert order.due(-0.5, -0.5) is None
    found = []
    while (block := order.due(0.5, 0)) is not None:
        found.append(block)
        order.put_back(block, 2, order.remove(block, 2))
    assert found == [3, 2], "half of four states, which save least"
    assert order.due(0.5, 0.3) is None, "the leaf that is reused last is put back"
    assert order.due(0, 1) == 4
    order.put_back(4, 2, order.remove(4, 2))
    assert order.due(0, 1) is None and order.due(1, 1) == 1, "no state with a state behind it frees KV"


def test_useless_blocks_are_evicted_first() -> None:
    order = order_of((1, SPARE, 0), (2, NEEDED, 0), now=10)
    order.put_first(3)
    order.put_first(4)
    assert order.first(requested=False) == 4 and len(order) == 4 and order.blocks() == {1, 2, 3, 4}
    order.remove(4, SPARE)
    assert order.first(requested=True) == 3
