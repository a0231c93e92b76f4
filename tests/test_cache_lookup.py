"""Check hash chains and the lookups along them."""

from __future__ import annotations

import random
from array import array

import pytest

from mambacache.cache.ledger import Ledger
from mambacache.cache.lookup import Found, Lookup, Prompts, extend_chain, root_hash
from mambacache.cache.pages import Pages
from mambacache.cache.pool import BlockPool
from mambacache.cache.retention import NEEDED, Chains, Needs
from mambacache.config import CacheConfig

SIZE = 4


def chain_of(tokens: list[int], *keys: object) -> list[bytes]:
    chain = [root_hash(*keys)]
    extend_chain(chain, array("i", tokens), SIZE)
    return chain


def ignore(block_hash: bytes, block: int, evicted: bool) -> None:
    pass


class Cached:
    """Commit chosen entries of a chain in pools."""

    def __init__(
        self, chain: list[bytes], *, strict: bool = False, attention: bool = True, max_seen: int = 100
    ) -> None:
        self.chain = chain
        chains = Chains(SIZE, 50)
        self.states = BlockPool(50, ignore, chains)
        pool = BlockPool(50 if attention else 0, ignore, chains)
        pages = Pages(SIZE, pool, Needs(pool.need, self.states.set_leaf))
        self.kv = pages.pool
        config = CacheConfig(num_state_blocks=50, max_seen_blocks=max_seen, strict_reuse=strict)
        self.index = Lookup(config, self.states, pages, Ledger(SIZE, 0, on=False))

    def put(self, states: list[int], kv: list[int], seen: list[int], near: tuple[int, ...] = ()) -> Cached:
        for pool, entries in ((self.states, states), (self.kv, kv)):
            for entry in entries:
                [block] = pool.take(1)
                pool.commit(block, self.chain[entry], exact=entry not in near, group=NEEDED)
        for entry in seen:
            self.index.add_computed(self.chain[entry])
        return self

    def match(self, limit: int, host: int | None = None) -> Found:
        return self.index.find(self.chain, limit, limit, host, waits=True)


def test_a_hash_stands_for_all_tokens_before_it() -> None:
    a, b = chain_of([*range(12)]), chain_of([9, *range(1, 12)])
    assert len(a) == 4 and not set(a[1:]) & set(b[1:])
    assert chain_of([*range(15)]) == a
    assert chain_of([*range(16)])[:4] == a


def test_roots_separate_tenants_models_and_generations() -> None:
    keys = [("model", 64, 0, 0, ""), ("other", 64, 0, 0, ""), ("model", 128, 0, 0, ""), ("model", 64, 7, 0, ""),
            ("model", 64, 0, 1, ""), ("model", 64, 0, 0, "salt"), ("model", 64, 0, 0, "('',)")]  # fmt: skip
    chains = [chain_of([1, 2, 3, 4], *key) for key in keys]
    assert len({entry for chain in chains for entry in chain}) == 2 * len(keys)


def test_chains_grow_by_whole_blocks() -> None:
    tokens = array("i", range(7))
    chain = [root_hash("")]
    extend_chain(chain, tokens, SIZE)
    assert len(chain) == 2
    tokens.append(7)
    extend_chain(chain, tokens, SIZE)
    assert chain == chain_of([*range(8)], "")


@pytest.mark.parametrize(
    ("states", "kv", "seen", "limit", "expected"),
    [
        ([], [], [], 5, Found(0, 0, 0)),
        ([2, 4], [1, 2, 3, 4, 5], [], 5, Found(5, 4, 5)),
        ([2, 4], [1, 2, 3], [], 5, Found(3, 2, 3)),
        ([2, 4], [1, 3, 4, 5], [], 5, Found(1, 0, 1)),
        ([5], [1, 2, 3, 4, 5], [], 4, Found(5, 0, 4)),  # one token at least must be computed
        ([2], [1, 2], [1, 2, 3, 4], 5, Found(2, 2, 4)),
        ([2], [1, 2], [1, 2], 5, Found(2, 2, 0)),
        ([], [], [3], 5, Found(0, 0, 3)),  # the LRU has dropped the beginning
    ],
)
def test_coverage_hit_and_junction(
    states: list[int], kv: list[int], seen: list[int], limit: int, expected: Found
) -> None:
    assert Cached(chain_of([*range(5 * SIZE)])).put(states, kv, seen).match(limit) == expected


@pytest.mark.parametrize(
    ("near", "expected"), [((), Found(4, 4, 5)), ((4,), Found(3, 2, 5)), ((2,), Found(1, 0, 5)), ((1,), Found(0, 0, 5))]
)
def test_strict_reuse_counts_exact_blocks_alone(near: tuple[int, ...], expected: Found) -> None:
    cached = Cached(chain_of([*range(5 * SIZE)]), strict=True)
    assert cached.put([2, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5], near).match(5) == expected


def test_the_host_says_how_far_its_kv_reaches() -> None:
    cached = Cached(chain_of([*range(5 * SIZE)]), attention=False).put([2, 4], [], [1, 2, 3])
    assert cached.match(5, host=3) == Found(3, 2, 3)
    assert cached.match(5, host=9) == Found(5, 4, 5)
    assert cached.match(5, host=0) == Found(0, 0, 3)


def test_without_attention_a_state_is_enough() -> None:
    cached = Cached(chain_of([*range(5 * SIZE)]), attention=False).put([4], [], [1, 2, 3, 4, 5])
    assert cached.match(5) == Found(5, 4, 5)
    assert cached.match(4) == Found(5, 4, 0)


def test_seen_hashes_are_bounded_and_cleared() -> None:
    cached = Cached(chain_of([*range(5 * SIZE)]), attention=False, max_seen=2).put([], [], [1, 2, 3])
    assert cached.match(5).junction == 3
    cached.index.add_computed(cached.chain[1])
    cached.index.add_computed(cached.chain[2])
    assert cached.match(5).junction == 2
    cached.index.forget_seen()
    assert cached.match(5).junction == 0


def test_a_chain_does_not_depend_on_the_chain_made_before() -> None:
    """The chain made before may have grown since, and may have another salt or other keys."""
    rng, prompts = random.Random(0), Prompts()
    common = rng.choices(range(3), k=40)
    for _ in range(500):
        tokens = array("i", common[: rng.randrange(41)] + rng.choices(range(3), k=rng.randrange(12)))
        root = rng.choice([b"root", b"other"])
        keys = {rng.randrange(5): b"image"} if rng.random() < 0.3 else {}
        alone = [root]
        extend_chain(alone, tokens, SIZE, keys)
        made = prompts.chain(root, tokens, SIZE, keys)
        assert made == alone
        made.append(b"grown")
