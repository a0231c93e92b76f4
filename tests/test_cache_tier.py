"""Check the host memory tier, one transfer at a time: copies, and the requests that wait for them."""

from __future__ import annotations

from array import array

import pytest

from cache_calls import allocate, run_step
from mambacache.cache.pool import BlockPool
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.cache.retention import NEEDED, SPARE
from mambacache.plan import Transfer
from mambacache.report import Hit, Wait
from symbolic import text
from watched_cache import refused, watched

LENGTH = 200  # of every prompt: it leaves a state after 192 tokens, and 3 full pages
ROOM = {"num_state_blocks": 6, "num_kv_blocks": 12, "num_host_states": 8, "num_host_pages": 40}


def answer(cache: PrefixCache, name: str, seed: int, **options: bool | str) -> int:
    """Run a prompt to its end, and return its hit tokens."""
    cache.add(name, text(LENGTH, seed), **options)  # type: ignore[arg-type]
    return finish(cache, name)


def finish(cache: PrefixCache, name: str, kv_tokens: int | None = None) -> int:
    found = cache.admit(name, kv_tokens=kv_tokens)
    assert isinstance(found, Hit), found
    run_step(cache, name, LENGTH - found.num_tokens, 1)
    cache.free(name, finished=True)
    return found.num_tokens


def copy_all(cache: PrefixCache, failed: bool = False) -> list[Transfer]:
    """End transfers until none is due."""
    ended: list[Transfer] = []
    while found := cache.transfers():
        for transfer in found:
            cache.transferred(transfer, failed=failed)
            ended.append(transfer)
    return ended


def filled(count: int = 6, **options: int) -> PrefixCache:
    """Return a cache that ran `count` prompts; the first prompts are on the host alone."""
    cache = watched(**{**ROOM, **options})
    for seed in range(count):
        answer(cache, str(seed), seed)
        copy_all(cache)
    return cache


def loading(cache: PrefixCache, name: str, seed: int = 0) -> Transfer:
    """Return the load that a request waits for."""
    cache.add(name, text(LENGTH, seed))
    assert cache.admit(name) == Wait("loading", name, 192) and cache.waits(name)
    return next(transfer for transfer in cache.transfers() if not transfer.to_host)


def chain_of(cache: PrefixCache, tokens: list[int]) -> list[bytes]:
    return cache._admission.chain(array("i", tokens), "", {})


def groups_of(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    return [pool.group[pool.lookup(each) or 0] for each in hashes]


def test_an_evicted_prefix_is_hit_from_the_host() -> None:
    cache = filled()
    transfer = loading(cache, "again")
    assert len(transfer.states) == 1 and len(transfer.pages) == 3
    cache.transferred(transfer)
    assert not cache.waits("again") and finish(cache, "again") == 192
    stats = cache.stats
    assert (stats.loads, stats.host_hit_tokens, stats.failed_transfers) == (1, 192, 0)


def test_a_host_that_never_asks_for_transfers_copies_nothing() -> None:
    cache = watched(**ROOM)
    for seed in range(6):
        answer(cache, str(seed), seed)
    assert cache.stats.host_states["free"] == 8 and answer(cache, "again", 0) == 0


def test_nothing_is_copied_while_there_is_room() -> None:
    cache = watched(**ROOM | {"num_state_blocks": 140, "num_kv_blocks": 140})
    answer(cache, "a", 0)
    assert cache.transfers() == ()
    cache = watched(**ROOM | {"num_state_blocks": 140, "num_kv_blocks": 140, "max_checkpoints": 4})
    answer(cache, "a", 0)
    assert len(cache.transfers()[0].states) == 1, "there is no room in the budget"


def test_nothing_is_copied_while_there_is_kv_that_no_state_needs() -> None:
    cache = watched(**ROOM | {"num_state_blocks": 140, "num_kv_blocks": 140})
    for seed in range(11):
        answer(cache, str(seed), seed)
    assert cache.transfers() != ()
    copy_all(cache, failed=True)
    cache = watched(**ROOM | {"num_state_blocks": 140, "num_kv_blocks": 140})
    for seed in range(11):
        answer(cache, str(seed), seed)
        cache._admission.pool.drop(chain_of(cache, text(LENGTH, seed))[3])
    answer(cache, "last", 11)
    assert cache.stats.kv_blocks["free"] == 104 and cache.transfers() == ()


def test_copies_run_singly_and_leave_half_of_the_available_blocks() -> None:
    cache = watched(**ROOM)
    for seed in range(3):
        answer(cache, str(seed), seed)
    before = cache.stats
    first = cache.transfers()
    lent = before.kv_blocks["evictable"] - cache.stats.kv_blocks["evictable"]
    assert len(first) == 1 and first[0].to_host and len(first[0].pages) == lent > 0
    available = before.kv_blocks["evictable"] + before.kv_blocks["free"]
    assert lent <= available // 2 and cache.transfers() == first
    cache.transferred(first[0])
    assert cache.stats.kv_blocks["evictable"] == before.kv_blocks["evictable"]


def test_a_copy_does_not_count_as_use_of_a_block() -> None:
    """A copied block is still the first to be evicted."""
    with_tier, without = filled(3), watched(**ROOM | {"num_host_states": 0, "num_host_pages": 0})
    for seed in range(3):
        answer(without, str(seed), seed)
    for cache in (with_tier, without):
        cache.take_events()
        cache.add("long", text(600, 9))
        assert isinstance(cache.admit("long"), Hit)
        allocate(cache, "long", 600)
    events = [cache.take_events() for cache in (with_tier, without)]
    removed = [[each.block_hash for each in its if (each.action, each.kind) == ("removed", "kv")] for its in events]
    assert removed[0] == removed[1] and len(removed[0]) > 6


def test_blocks_hit_on_the_device_are_evicted_first_on_the_host() -> None:
    cache = filled(3)
    tier, chain = cache._admission.tier, chain_of(cache, text(LENGTH, 2))
    before = [pool.idle.first(True) for pool in (tier.states, tier.pages)]
    slots = [tier.states.lookup(chain[3]), tier.pages.lookup(chain[3])]
    assert None not in slots and before != slots
    assert answer(cache, "again", 2) == 192 and cache.stats.loads == 0
    assert tier.states.idle.first(True) == slots[0]
    assert tier.pages.idle.first(True) in [tier.pages.lookup(each) for each in chain[1:4]]


def test_a_host_short_of_pages_evicts_whole_prefixes() -> None:
    """Room for three prefixes: each has all its KV, or neither state nor KV is left."""
    cache = filled(num_host_pages=11)
    tier, kept = cache._admission.tier, 0
    for seed in range(6):
        chain = chain_of(cache, text(LENGTH, seed))
        held = [tier.pages.lookup(each) is not None for each in chain[1:4]]
        if tier.states.lookup(chain[3]) is not None:
            kept += 1
            assert all(held)
    assert kept == 3 and sum(group == NEEDED for group in tier.pages.group) == 9


def test_kv_stays_on_the_host_while_another_state_there_needs_it() -> None:
    """A hit on the device gives up its copies on the host, but not KV that it shares with another state."""
    cache = watched(**ROOM)
    trunk = text(128, 7)
    prompts = [[*trunk, *text(72, seed)] for seed in range(2)]
    for name, prompt in zip("ab", prompts, strict=True):
        cache.add(name, prompt)
        finish(cache, name)
    for seed in range(2):
        answer(cache, str(seed), seed)
        copy_all(cache)
    tier, chains = cache._admission.tier, [chain_of(cache, prompt) for prompt in prompts]
    assert all(tier.states.lookup(chain[3]) for chain in chains)
    assert groups_of(tier.pages, chains[0][1:4]) == [NEEDED] * 3
    tier.hit(chains[0][3])
    assert [groups_of(tier.pages, chain[1:4]) for chain in chains] == [[NEEDED, NEEDED, SPARE], [NEEDED] * 3]
    tier.hit(chains[1][3])
    tier.hit(chains[1][2])  # the junction
    assert groups_of(tier.pages, chains[1][1:4]) == [SPARE] * 3
    cache._admission.pool.drop(chains[0][3], evicted=True)
    assert groups_of(tier.pages, chains[0][1:4]) == [NEEDED] * 3, "the copy that is left counts again"
    junction, end = groups_of(tier.states, chains[0][2:4])
    assert junction == SPARE < end and end % 2 == 0
    cache._admission.pool.drop(chains[0][2], evicted=True)
    assert groups_of(tier.states, chains[0][2:3])[0] % 2 == 1, "a state stands behind it"
    cache.check()


def test_a_state_on_the_host_has_all_kv_before_it() -> None:
    cache, held = watched(**ROOM), 0
    admission = cache._admission
    for seed in range(6):
        answer(cache, str(seed), seed)
        copy_all(cache)
        for each in range(seed + 1):
            chain = chain_of(cache, text(LENGTH, each))
            if admission.tier.states.lookup(chain[3]) is not None:
                held += 1
                kv = (admission.tier.pages.lookup, admission.pages.pool.lookup)
                assert all(any(lookup(h) is not None for lookup in kv) for h in chain[1:4])
    assert held > 6


@pytest.mark.parametrize("failed", [False, True])
def test_two_requests_wait_for_the_same_load(failed: bool) -> None:
    cache = filled()
    transfer = loading(cache, "a")
    cache.add("b", text(LENGTH, 0))
    assert cache.admit("b") == Wait("loading", "a", 192)
    assert [each for each in cache.transfers() if not each.to_host] == [transfer]
    cache.transferred(transfer, failed=failed)
    if not failed:
        assert finish(cache, "a") == finish(cache, "b") == 192
        assert cache.stats.loads == 1 and cache.stats.host_hit_tokens == 384
        return
    assert isinstance(cache.admit("a"), Hit), "the request that began a failed load goes on without it"
    assert cache.stats.failed_transfers == 1


def test_loaded_blocks_are_held_for_their_request() -> None:
    cache = filled()
    transfer = loading(cache, "a")
    cache.transferred(transfer)
    evictable = cache.stats.kv_blocks["evictable"]
    cache.free("a", finished=False)
    assert cache.stats.kv_blocks["evictable"] == evictable + 3


@pytest.mark.parametrize("end", ["abort", "reset"])
def test_an_abort_or_a_reset_during_a_load(end: str) -> None:
    """The blocks of the load count as `writing` until it ends. Then they are cached, or free after a reset."""
    cache = filled()
    transfer = loading(cache, "a")
    if end == "abort":
        cache.free("a", finished=False)
    else:
        cache.reset()
        assert not cache.waits("a")
        assert isinstance(cache.admit("a"), Hit)
    assert cache.stats.kv_blocks["writing"] >= 3
    cache.transferred(transfer)
    assert cache.stats.kv_blocks["writing"] == (4 if end == "reset" else 0) - 4 * (end == "reset")
    assert (cache._admission.tier.states.num_committed == 0) == (end == "reset")


def test_a_running_request_may_take_blocks_loaded_for_a_waiting_request() -> None:
    """Blocks that are held for a waiting request give way, so that nothing stalls."""
    cache = filled(num_kv_blocks=8)
    cache.add("long", text(250, 40))
    assert isinstance(cache.admit("long"), Hit)
    run_step(cache, "long", 250, 1)
    cache.transferred(loading(cache, "a"))
    for _ in range(64 * 4):
        run_step(cache, "long", 1, 1)
    assert cache.progress("long").computed == 250 + 256


def test_loaded_kv_whose_state_finds_no_room_is_needed_by_nobody() -> None:
    cache = filled(max_checkpoints=1)
    transfer = loading(cache, "a")
    cache.add("running", text(LENGTH, 5))
    assert cache.admit("running").num_tokens == 192  # type: ignore[union-attr]
    cache.transferred(transfer)
    pool, chain = cache._admission.pages.pool, chain_of(cache, text(LENGTH, 0))
    assert cache._admission.pool.lookup(chain[3]) is None and groups_of(pool, chain[1:4]) == [SPARE] * 3


def test_a_load_that_is_not_worth_its_bytes_is_not_started() -> None:
    """Load 192 tokens: a state of 1,000 bytes and 3 pages of 100 bytes."""
    sizes = {"state_bytes": 1000, "page_bytes": 100}
    for allowed, loads in ((6, 0), (7, 1)):
        cache = filled(**sizes, host_bytes_per_token=allowed)
        cache.add("again", text(LENGTH, 0))
        assert isinstance(cache.admit("again"), Wait) == bool(loads) and cache.stats.loads == loads
        assert cache.stats.bytes_to_host >= 1300


def test_a_load_keeps_the_exact_flag_and_the_salt() -> None:
    cache = filled(strict_reuse=True)
    cache.transferred(loading(cache, "a"))
    found = cache.admit("a")
    assert isinstance(found, Hit) and found.exact and found.num_tokens == 192
    assert answer(cache, "other", 1, salt="tenant") == 0


def test_a_failed_row_removes_its_copies_on_the_host() -> None:
    """Blocks of a step that failed on the device are found on neither side."""
    cache = watched(**ROOM | {"max_checkpoints": 2})
    cache.add("a", text(LENGTH, 0))
    cache.admit("a")
    steps = cache.plan([allocate(cache, "a", 192)]).steps
    cache.issued(steps)
    cache.preempt("a")
    for transfer in cache.transfers():
        cache.transferred(transfer)
    assert cache.stats.host_states["committed"] == 1
    under_way = cache.transfers()
    cache.cancel(steps)
    for transfer in under_way:
        cache.transferred(transfer)
    copy_all(cache)
    assert cache.stats.host_states["committed"] == cache.stats.host_pages["committed"] == 0


def test_transfers_are_ended_once() -> None:
    cache = filled()
    transfer = loading(cache, "a")
    for wrong in (transfer._replace(number=99), transfer._replace(to_host=True)):
        with refused(cache, RuntimeError, "is not under way"):
            cache.transferred(wrong)
    cache.transferred(transfer)
    with refused(cache, RuntimeError, f"transfer {transfer.number} is not under way: end each of `transfers` once"):
        cache.transferred(transfer)


def test_without_attention_only_states_are_copied() -> None:
    cache = filled(num_kv_blocks=0, num_host_pages=0, has_attention=False)
    transfer = loading(cache, "a")
    assert len(transfer.states) == 1 and not transfer.pages
    cache.transferred(transfer)
    assert finish(cache, "a") == 192


OUTSIDE = {"num_kv_blocks": 0, "num_host_pages": 0}
"""The host engine keeps the KV."""


def filled_outside(**options: int) -> PrefixCache:
    """Return a cache whose KV the host engine keeps; it ran six prompts, the first of which are on the host alone."""
    cache = watched(**ROOM | OUTSIDE | options)
    for seed in range(6):
        cache.add(str(seed), text(LENGTH, seed))
        finish(cache, str(seed), kv_tokens=0)
        copy_all(cache)
    return cache


@pytest.mark.parametrize(("covered", "hit"), [(LENGTH, 192), (192, 192), (191, 0), (0, 0)])
def test_a_state_comes_back_if_the_host_engine_has_its_kv(covered: int, hit: int) -> None:
    cache = filled_outside()
    cache.add("again", text(LENGTH, 0))
    if not hit:
        assert finish(cache, "again", kv_tokens=covered) == 0 and cache.stats.loads == 0
        return
    assert cache.admit("again", kv_tokens=covered) == Wait("loading", "again", 192)
    [transfer] = [each for each in cache.transfers() if not each.to_host]
    assert len(transfer.states) == 1 and not transfer.pages
    cache.transferred(transfer)
    assert finish(cache, "again", kv_tokens=covered) == 192
    assert (cache.stats.loads, cache.stats.host_hit_tokens) == (1, 192)


def test_a_state_whose_kv_goes_while_it_comes_back_costs_a_miss() -> None:
    cache = filled_outside()
    cache.add("again", text(LENGTH, 0))
    assert isinstance(cache.admit("again", kv_tokens=LENGTH), Wait)
    [transfer] = [each for each in cache.transfers() if not each.to_host]
    cache.transferred(transfer)
    assert finish(cache, "again", kv_tokens=100) == 0
    copy_all(cache)
    cache.check()


def test_states_in_host_memory_without_kv_are_evicted_first() -> None:
    cache = filled_outside()
    tier, chain = cache._admission.tier, chain_of(cache, text(LENGTH, 1))
    slot, next_slot = tier.states.lookup(chain[3]), tier.states.idle.first(True)
    assert slot not in (None, next_slot)
    cache.kv_evicted([chain[3]])
    assert tier.states.idle.first(True) == slot
    cache.kv_stored([chain[3]])
    assert tier.states.idle.first(True) == next_slot


def test_a_load_is_told_under_a_request_that_waits_for_it() -> None:
    """A host engine knows the KV behind a state by the request of its event."""
    cache = filled_outside()
    for name in "ab":
        cache.add(name, text(LENGTH, 0))
        assert cache.admit(name, kv_tokens=LENGTH) == Wait("loading", "a", 192)
    cache.free("a", finished=False)
    cache.take_events()
    [transfer] = [each for each in cache.transfers() if not each.to_host]
    cache.transferred(transfer)
    assert [(each.action, each.request_id) for each in cache.take_events()] == [("stored", "b")]


def test_events_tell_of_the_host_what_it_holds() -> None:
    """A copy is told once it is made, and gone after a reset."""
    cache = watched(**ROOM)
    for seed in range(3):
        answer(cache, str(seed), seed)
    cache.take_events()
    [transfer] = cache.transfers()
    assert not cache.take_events()
    cache.transferred(transfer)
    told = cache.take_events()
    tier = cache._admission.tier
    held = {("state", each) for each in tier.states._blocks} | {("kv", each) for each in tier.pages._blocks}
    assert {(each.kind, each.block_hash) for each in told} == held and len(told) == len(held) > 3
    assert {(each.action, each.num_tokens, each.request_id, each.on_host) for each in told} == {("stored", 0, "", True)}
    cache.reset()
    gone = [(each.action, each.kind, each.block_hash) for each in cache.take_events() if each.on_host]
    assert sorted(gone) == sorted(("removed", *each) for each in held)


def test_a_load_that_nobody_waits_for_arrives_for_nobody() -> None:
    cache = filled_outside()
    cache.add("a", text(LENGTH, 0))
    assert isinstance(cache.admit("a", kv_tokens=LENGTH), Wait)
    cache.free("a", finished=False)
    cache.take_events()
    [transfer] = [each for each in cache.transfers() if not each.to_host]
    cache.transferred(transfer)
    assert not cache.take_events()
    cache.check()
