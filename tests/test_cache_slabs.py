"""Share a memory between states and KV pages: traffic divides it, and no pool keeps slabs that the other needs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from cache_calls import hit, make, run_step, started
from mambacache import CacheConfig
from mambacache.cache.pool import BlockPool
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.cache.retention import NEEDED, SPARE, Chains
from mambacache.cache.slabs import SlabPool, Slabs
from symbolic import text
from test_cache_pool import commit, name, taken

PAGES = 5


def ignore(*_: object) -> None:
    pass


def pools(
    num_slabs: int = 10, reserve: int = 2, states: int = 1, pages: int = PAGES
) -> tuple[Slabs, SlabPool, SlabPool]:
    """Return slabs and two pools that own half of them each."""
    chains = Chains(64, 100)
    slabs = Slabs(num_slabs, reserve)
    made = SlabPool(slabs, states, ignore, chains), SlabPool(slabs, pages, ignore, chains)
    slabs.divide(*made)
    while made[0].num_slabs < num_slabs // 2:
        slabs.move(made[0])
    return slabs, *made


def check(slabs: Slabs, *held: list[int]) -> None:
    for pool, blocks in zip(slabs.pools, held, strict=True):
        pool.check(blocks)
    slabs.check()


def test_ids_of_a_slab_follow_each_other_and_slab_0_is_never_given() -> None:
    slabs, states, pages = pools()
    assert (states.num_owned, pages.num_owned) == (5, 25)
    blocks, page_ids = states.take(5), pages.take(25)
    assert sorted(blocks) == [1, 2, 3, 4, 5] and sorted(page_ids) == list(range(6 * PAGES, 11 * PAGES))
    check(slabs, blocks, page_ids)


def test_a_chain_takes_neighbouring_pages() -> None:
    _, _, pages = pools()
    [first], [other] = pages.take(1), pages.take(1, near=7 * PAGES)
    assert pages.take(2, near=first) == [first + 1, first + 2] and pages.take(1, near=other) == [other + 1]


@pytest.mark.parametrize("kind", ["states", "pages"])
def test_a_pool_with_nothing_to_evict_takes_evictable_slabs_of_the_other(kind: str) -> None:
    slabs, states, pages = pools()
    if kind == "states":
        for i in range(25):
            commit(pages, i)
        assert states.num_available == 10  # all five pages of each slab may be evicted
        blocks = states.take(8)
        assert pages.num_owned == 10 and pages.num_committed == 10
        check(slabs, blocks, [])
    else:
        for i in range(5):
            commit(states, i)
        assert pages.num_available == 25 + 3 * PAGES  # two slabs are kept for states
        blocks = pages.take(40)
        assert states.num_owned == states.num_committed == 2 and pages.num_available == 0
        check(slabs, [], blocks)


def test_a_held_page_keeps_only_its_own_slab() -> None:
    slabs, states, pages = pools()
    kept = [commit(pages, i) for i in range(25)][::PAGES][:2]  # a page in each of two slabs
    for page in kept:
        pages.hold(page)
    assert states.num_available == 8
    blocks = states.take(8)
    assert all(pages.hashes[page] is not None for page in kept)
    check(slabs, blocks, kept)
    assert states.lease() is None and states.lease(requested=False) is None


def test_a_slab_without_valued_blocks_moves_before_others() -> None:
    _, states, pages = pools(num_slabs=4)
    valued = [commit(pages, 5 + i, group=NEEDED if i == 4 else SPARE) for i in range(5)]
    spare = [commit(pages, i, group=SPARE) for i in range(5)]
    states.take(3)
    assert not any(pages.hashes[each] for each in spare) and all(pages.hashes[each] for each in valued)


def test_pages_take_the_place_of_a_state_but_never_of_the_reserve() -> None:
    slabs, states, pages = pools()
    for i in range(5):
        commit(states, i, group=3)
    for i in range(26):
        commit(pages, i)
    assert (states.num_slabs, states.num_committed, pages.num_committed) == (4, 4, 26)
    for i in range(26, 60):
        commit(pages, i)
    assert (states.num_slabs, states.num_committed, pages.num_committed) == (2, 2, 40)
    check(slabs, [], [])


def test_at_the_reserve_pages_take_the_place_of_the_kv_of_a_state() -> None:
    slabs, states, pages = pools(num_slabs=4)
    inner, leaf = (commit(states, i, group=group) for i, group in enumerate((3, 2)))
    kv = [commit(pages, i) for i in range(10)]

    def removed(_: bytes, block: int, evicted: bool) -> None:
        if block == leaf:
            pages.need(name(3), needed=False)

    states._on_removed = removed
    commit(pages, 10)
    assert states.hashes[inner] and not states.hashes[leaf] and not pages.lookup(name(3))
    assert sum(pages.hashes[page] is not None for page in kv) == 10  # page 10 has the id of page 3
    check(slabs, [], [])


def test_spare_blocks_of_the_fullest_slab_are_evicted_first() -> None:
    slabs, states, pages = pools(num_slabs=6)
    held = [*states.take(3)], [*pages.take(15)]
    for i, page in enumerate(held[1]):
        assert pages.commit(page, name(i), exact=True, group=SPARE if i in (0, 1, 2, 5, 6, 10, 11) else NEEDED)
        if i != 6:
            pages.release(page)
    assert pages.take(1) == [held[1][5]]
    assert not {*pages.take(2)} ^ {*held[1][10:12]}
    assert pages.num_committed == 12
    check(slabs, held[0], [held[1][i] for i in (5, 6, 10, 11)])


def test_a_seized_block_keeps_its_pool_and_the_division() -> None:
    """After the cache rebuilt its records, the slab may belong to the other pool."""
    slabs, states, pages = pools()
    lease = pages.seize(2 * PAGES + 1)
    assert (states.num_slabs, pages.num_slabs) == (5, 5)
    assert pages.owned_slabs() >= {2} and 2 not in states.owned_slabs()
    check(slabs, [], [lease.block])
    lease.end()
    check(slabs, [], [])


def test_empty_slabs_go_to_the_pool_that_lacks_room() -> None:
    slabs, states, pages = pools(num_slabs=40, reserve=5)
    for i in range(28):
        commit(states, i)
    assert (states.num_slabs, pages.num_empty) == (28, 12)
    for i in range(100):
        commit(pages, i)
    assert (states.num_committed, pages.num_committed) == (20, 100)
    check(slabs, [], [])
    slabs, states, pages = pools(num_slabs=40, reserve=5)
    for i in range(400):
        commit(pages, i)
    assert (states.num_slabs, states.num_empty) == (5, 5)
    check(slabs, [], [])


@pytest.mark.parametrize("shape", [(1, 5), (1, 1), (4, 1)])
def test_random_use_keeps_each_slab_in_a_single_pool(shape: tuple[int, int]) -> None:
    slabs, *both = pools(12, 3, *shape)
    rng = random.Random(0)
    held: list[list[int]] = [[], []]
    moves = 0
    for _ in range(6000):
        side = rng.random() < 0.5
        pool, own, move = both[side], held[side], rng.randrange(6)
        before = both[0].num_slabs
        if move < 2:
            count = rng.choice([1, 1, 2, 7])
            if count <= pool.num_available:
                own += pool.take(count, near=rng.choice(own) if own else 0)
            else:
                assert pool.num_available < count
        elif move == 2 and own:
            for block in own[: rng.randrange(1, 4)]:
                own.remove(block)
                pool.release(block, used=rng.choice([None, 0.0]))
        elif move == 3 and own and pool.hashes[block := rng.choice(own)] is None:
            pool.commit(block, name(rng.randrange(40)), exact=rng.random() < 0.5, group=rng.randrange(6))
        elif move == 4 and (found := pool.lookup(name(rng.randrange(40)))) is not None:
            own.append(rng.choice([pool.share, pool.lend])(found).block)
        elif move == 5:
            pool.drop(name(rng.randrange(40)))
            pool.idle._reuse.now += rng.randrange(3)
        moves += both[0].num_slabs != before
        check(slabs, *held)
    assert moves > 5


# --- traffic divides the memory ---


def cache_of(num_slabs: int, reserve: int = 3) -> PrefixCache:
    return make(
        num_state_blocks=num_slabs, num_kv_blocks=(num_slabs - reserve) * PAGES, slab=(1, PAGES), accounting=False
    )


def ask_repeatedly(cache: PrefixCache, length: int, count: int, requests: int, seed: int) -> Iterator[int]:
    """Ask for `count` prompts of this length at random, and yield the hits."""
    rng = random.Random(seed)
    for i in range(requests):
        tokens = [*text(length, rng.randrange(count)), i % 40]
        cache.add("a", tokens)
        found = cache.admit("a")
        left = cache.progress("a")
        run_step(cache, "a", left.prefill_end - left.computed, sampled=1)
        cache.free("a", finished=True)
        yield found.num_tokens  # type: ignore[union-attr]
    cache.check()


def test_traffic_divides_the_memory() -> None:
    cache = cache_of(60)
    assert cache.stats.state_blocks["committed"] == 0
    list(ask_repeatedly(cache, 130, 36, 1500, 1))
    short = cache.stats
    list(ask_repeatedly(cache, 1290, 12, 1500, 2))
    long = cache.stats
    assert short.state_blocks["committed"] > 2 * long.state_blocks["committed"]
    assert long.kv_blocks["committed"] > 1.3 * short.kv_blocks["committed"]


def test_shared_memory_hits_more_than_two_badly_divided_pools() -> None:
    """Ask short prompts of a memory that is divided for long prompts."""
    shared, divided = cache_of(40), make(num_state_blocks=6, num_kv_blocks=34 * PAGES, accounting=False)
    hits = [sum(list(ask_repeatedly(cache, 130, 24, 2000, 3))[1000:]) for cache in (shared, divided)]
    assert hits[0] > 1.5 * hits[1]


def test_a_long_prompt_may_take_all_but_the_reserve() -> None:
    cache = cache_of(20)
    list(ask_repeatedly(cache, 130, 17, 100, 1))
    longest = 17 * PAGES * 64
    started(cache, "a", text(longest))
    run_step(cache, "a", longest - cache.progress("a").computed, sampled=1)
    cache.check()
    with pytest.raises(ValueError, match="raise num_kv_blocks"):
        cache.add("b", text(longest + 1))
    cache.free("a", finished=True)
    assert hit(cache, [*text(longest), 1][:longest]) == longest - 64


def test_a_pool_without_slabs_gives_ids_in_order() -> None:
    pool = BlockPool(3, ignore, Chains(64, 3))
    assert (pool.num_owned, pool.take(2, near=3), taken(pool)) == (3, [1, 2], 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slab": (2, 4)}, "let a slab hold one state or one page"),
        ({"slab": (1, 4), "num_kv_blocks": 0}, "num_kv_blocks 0: .* fill slabs"),
        ({"slab": (1, 5)}, "fill slabs"),
        ({"slab": (3, 1)}, "fill slabs"),
        ({"slab": (1, 1)}, "leave 2 to running requests"),
    ],
)
def test_bad_slab_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(**{"num_state_blocks": 16, "num_kv_blocks": 16, **options})
