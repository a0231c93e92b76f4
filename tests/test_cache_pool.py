"""Check ids, references and the order of eviction."""

from __future__ import annotations

import random
import time

import pytest

from mambacache.cache.pool import BlockPool
from mambacache.cache.retention import NEEDED, SPARE, Chains


class Removed(list[tuple[bytes, int, bool]]):
    def __call__(self, block_hash: bytes, block: int, evicted: bool) -> None:
        self.append((block_hash, block, evicted))


def taken(pool: BlockPool, requested: bool = True) -> int | None:
    lease = pool.lease(requested)
    return lease.block if lease is not None else None


def name(i: int) -> bytes:
    return i.to_bytes(16, "big")


def commit(pool: BlockPool, i: int, *, exact: bool = True, group: int = NEEDED) -> int:
    """Commit a block without references, at a time of its own."""
    pool.idle._reuse.now += 1
    block = taken(pool)
    assert block is not None and pool.commit(block, name(i), exact=exact, group=group)
    pool.release(block)
    return block


@pytest.fixture
def removed() -> Removed:
    return Removed()


def test_every_id_is_given_once_and_the_null_block_never(removed: Removed) -> None:
    pool = BlockPool(4, removed, Chains(64, 4))
    assert sorted(taken(pool) or 0 for _ in range(4)) == [1, 2, 3, 4]
    assert taken(pool) is None
    pool.release(3)
    assert taken(pool) == 3
    assert removed == []


def test_a_private_block_is_free_when_its_last_holder_leaves(removed: Removed) -> None:
    pool = BlockPool(2, removed, Chains(64, 2))
    block = taken(pool)
    assert block is not None
    pool.share(block)
    pool.release(block)
    assert (pool.counts()["free"], pool.references[block]) == (1, 1)
    pool.release(block)
    assert (pool.counts()["free"], pool.counts()["evictable"], pool.num_available) == (2, 0, 2)


def test_a_committed_block_is_found_until_it_is_evicted(removed: Removed) -> None:
    pool = BlockPool(2, removed, Chains(64, 2))
    block = commit(pool, 7)
    assert pool.lookup(name(7)) == block
    assert (pool.counts()["free"], pool.counts()["evictable"], pool.num_committed) == (1, 1, 1)
    assert taken(pool) != block  # free blocks go first
    assert removed == []
    assert taken(pool) == block
    assert removed == [(name(7), block, True)]
    assert pool.lookup(name(7)) is None and pool.hashes[block] is None


def test_a_referenced_block_is_never_evicted(removed: Removed) -> None:
    pool = BlockPool(2, removed, Chains(64, 2))
    block = commit(pool, 1)
    pool.share(block)
    assert taken(pool) is not None
    assert taken(pool) is None and not pool.evict()
    pool.release(block)
    assert taken(pool) == block


def test_spare_blocks_go_first_then_the_least_recently_used(removed: Removed) -> None:
    pool = BlockPool(6, removed, Chains(64, 6))
    for i, group in enumerate([NEEDED, SPARE, NEEDED, SPARE, NEEDED, NEEDED]):
        commit(pool, i, group=group)
    block = pool.lookup(name(0))
    assert block is not None
    pool.idle._reuse.now += 1
    pool.share(block)
    pool.release(block)  # used again: now the last that is needed
    assert [taken(pool, requested=False) is not None for _ in range(3)] == [True, True, False]
    while taken(pool) is not None:
        pass
    assert [int.from_bytes(block_hash, "big") for block_hash, _, _ in removed] == [1, 3, 2, 4, 5, 0]


@pytest.mark.parametrize("referenced", [False, True])
def test_promote_moves_a_block_to_the_end_of_its_group(referenced: bool, removed: Removed) -> None:
    pool = BlockPool(3, removed, Chains(64, 3))
    cold = commit(pool, 0, group=SPARE)
    commit(pool, 1)
    commit(pool, 2)
    pool.idle._reuse.now += 1
    if referenced:
        pool.share(cold)
        pool.promote(cold, NEEDED)
        pool.release(cold)
    else:
        pool.promote(cold, NEEDED)
    assert taken(pool, requested=False) is None
    while taken(pool) is not None:
        pass
    assert [int.from_bytes(block_hash, "big") for block_hash, _, _ in removed] == [1, 2, 0]


def test_a_hash_that_is_held_stays_with_its_holder(removed: Removed) -> None:
    pool = BlockPool(2, removed, Chains(64, 2))
    holder, late = commit(pool, 5), taken(pool)
    assert late is not None
    assert not pool.commit(late, name(5), exact=True, group=NEEDED)
    assert pool.lookup(name(5)) == holder and pool.hashes[late] is None
    pool.release(late)
    assert pool.counts()["free"] == 1 and removed == []


@pytest.mark.parametrize("shared", [False, True])
def test_an_exact_block_takes_the_hash_of_a_near_block(shared: bool, removed: Removed) -> None:
    pool = BlockPool(2, removed, Chains(64, 2))
    near = commit(pool, 5, exact=False)
    if shared:
        pool.share(near)
    exact = taken(pool)
    assert exact is not None and pool.commit(exact, name(5), exact=True, group=SPARE)
    assert pool.lookup(name(5)) == exact and pool.exact[exact]
    assert removed == [(name(5), near, False)]
    assert pool.hashes[near] is None and pool.group[exact] == NEEDED
    assert pool.counts()["free"] == (0 if shared else 1)
    if shared:
        pool.release(near)
        assert pool.counts()["free"] == 1
    late = taken(pool)
    assert late is not None and not pool.commit(late, name(5), exact=False, group=NEEDED)


def test_a_near_block_takes_no_hash_from_another(removed: Removed) -> None:
    pool = BlockPool(2, removed, Chains(64, 2))
    near, late = commit(pool, 5, exact=False), taken(pool)
    assert late is not None and not pool.commit(late, name(5), exact=False, group=NEEDED)
    assert pool.lookup(name(5)) == near and removed == []


def test_withdraw_needs_a_sole_holder(removed: Removed) -> None:
    pool = BlockPool(1, removed, Chains(64, 1))
    block = commit(pool, 5)
    pool.share(block)
    pool.share(block)
    with pytest.raises(RuntimeError, match="block 1 has 2 holders"):
        pool.withdraw(block)
    pool.release(block)
    pool.withdraw(block)
    assert pool.lookup(name(5)) is None and pool.references[block] == 1
    assert removed == [(name(5), block, False)]


def test_removing_a_hash_leaves_other_blocks_alone(removed: Removed) -> None:
    pool = BlockPool(3, removed, Chains(64, 3))
    near = commit(pool, 5, exact=False)
    pool.share(near)
    exact = taken(pool)
    assert exact is not None and pool.commit(exact, name(5), exact=True, group=NEEDED)
    pool.release(near)  # its hash went to `exact`, and is not removed again
    assert pool.lookup(name(5)) == exact
    assert len(removed) == 1


def test_drop_and_clear(removed: Removed) -> None:
    pool = BlockPool(4, removed, Chains(64, 4))
    idle, held = commit(pool, 1), commit(pool, 2)
    pool.share(held)
    pool.drop(name(9))
    pool.drop(name(1), evicted=True)
    pool.clear()
    assert removed == [(name(1), idle, True), (name(2), held, False)]
    assert pool.counts() == {"free": 3, "writing": 1, "committed": 0, "evictable": 0}
    pool.release(held)
    assert pool.counts()["free"] == 4


def test_counts_by_status(removed: Removed) -> None:
    pool = BlockPool(5, removed, Chains(64, 5))
    held = commit(pool, 1)
    commit(pool, 2)
    pool.share(held)
    taken(pool)
    assert pool.counts() == {"free": 2, "writing": 1, "committed": 2, "evictable": 1}


def test_random_use_keeps_references_hashes_and_counts_right(removed: Removed) -> None:
    rng = random.Random(0)
    pool = BlockPool(12, removed, Chains(64, 12))
    held: list[int] = []
    for i in range(5000):
        move = rng.randrange(6)
        if move < 2 and (block := taken(pool, requested=rng.random() < 0.7)) is not None:
            held.append(block)
        elif move == 2 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif move == 3 and held and pool.hashes[block := rng.choice(held)] is None:
            pool.commit(block, name(rng.randrange(30)), exact=rng.random() < 0.5, group=rng.randrange(6))
        elif move == 4 and (found := pool.lookup(name(rng.randrange(30)))) is not None:
            pool.share(found)
            held.append(found)
            if rng.random() < 0.3:
                pool.evict_first(found)
            elif rng.random() < 0.5:
                pool.promote(found, rng.randrange(6))
        elif move == 5 and rng.random() < 0.1:
            pool.drop(name(rng.randrange(30)))
        assert [pool.references[b] for b in range(13)] == [held.count(b) for b in range(13)]
        assert pool.num_available + len(set(held)) == 12, i
        assert all(pool.lookup(h) == b for b, h in enumerate(pool.hashes) if h is not None)
        assert sum(pool.counts()[status] for status in ("free", "writing", "committed")) == 12


@pytest.mark.parametrize("held", [False, True])
def test_a_restored_block_has_the_group_it_had_before(removed: Removed, held: bool) -> None:
    pool = BlockPool(2, removed, Chains(64, 100))
    blocks = pool.take(2)
    for block, group in zip(blocks, [4, NEEDED], strict=True):
        pool.commit(block, name(block), exact=True, group=group)
        if not held:
            pool.release(block)
        pool.evict_first(block)
        pool.evict_first(block)
    assert pool.restore(name(blocks[0])) and pool.restore(name(blocks[1]), 6)
    assert not pool.restore(name(99))
    assert [pool.group[block] for block in blocks] == [4, 6]
    for block in blocks if held else ():
        pool.release(block)
    assert pool.evict() and pool.lookup(name(blocks[0])) is None


def test_a_call_costs_the_same_in_a_large_pool(removed: Removed) -> None:
    def turnover(blocks: int) -> float:
        pool = BlockPool(blocks, removed, Chains(64, blocks))
        for i in range(blocks):
            commit(pool, i)
        best = float("inf")
        for round_ in range(1, 6):
            start = time.perf_counter()
            for i in range(1000):
                commit(pool, blocks * 10 * round_ + i)
            best = min(best, time.perf_counter() - start)
        return best

    assert turnover(100_000) < 20 * turnover(100)
