"""The report: what was lost and why, each reason at least once, and the record behind the ceiling."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import takewhile

import pytest

from cache_calls import make, run_step
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.cache.prefix_index import extend_chain, root_hash
from mambacache.cache.report import ComputedRecord, Loss, RequestReport, common_tokens, partition_loss
from mambacache.config import CacheConfig
from symbolic import answer, text
from symbolic_driver import Job, run

E, C, N, G = Loss.EVICTED, Loss.NO_CAPACITY, Loss.NO_STATE, Loss.GRANULARITY


@pytest.mark.parametrize(
    ("hit", "ceiling", "causes", "expected"),
    [
        (0, 0, [], {}),
        (64, 64, [], {}),
        (64, 100, [], {G: 36}),
        (0, 200, [None, None, None], {G: 8, N: 192}),
        (0, 200, [None, E, None], {G: 8, E: 128, N: 64}),
        (64, 256, [C, None, E], {C: 64, E: 128}),
    ],
)
def test_a_block_is_lost_to_the_nearest_cause_above_it(
    hit: int, ceiling: int, causes: list[Loss | None], expected: dict[Loss, int]
) -> None:
    assert partition_loss(hit, ceiling, 64, causes, not_asked=False) == expected
    assert sum(expected.values()) == ceiling - hit


def test_all_is_lost_to_a_request_that_does_not_read() -> None:
    assert partition_loss(0, 100, 64, [E], not_asked=True) == {Loss.NOT_ASKED: 100}
    assert partition_loss(0, 0, 64, [], not_asked=True) == {}


def losses(options: dict, *jobs: Job) -> list[dict[Loss, int]]:
    d = run(jobs, max_num_seqs=1, **{"budget": 8192, **options})
    reports = [d.requests[i, 0].report for i in range(len(jobs))]
    assert None not in reports
    return [report.losses for report in reports if report is not None]


def test_granularity() -> None:
    assert losses({}, Job(text(300)), Job(text(300)))[1] == {G: 43}


def test_no_state_there() -> None:
    # The first prompt's tail is beyond what the second shares with it.
    assert losses({}, Job(text(300)), Job([*text(200), text(201)[-1] ^ 1]))[1] == {N: 192, G: 8}


def test_evicted_state() -> None:
    others = [Job(text(100, seed), 1) for seed in range(1, 5)]
    assert losses({"num_state_blocks": 3}, Job(text(300)), *others, Job(text(300)))[-1] == {E: 256, G: 43}


def test_evicted_kv() -> None:
    assert losses({"num_kv_blocks": 6}, Job(text(300)), Job(text(300, 1)), Job(text(300)))[-1] == {E: 256, G: 43}


def test_evicted_kv_of_a_host() -> None:
    cache = make(num_kv_blocks=0)
    cache.add("a", text(200))
    assert cache.admit("a", kv_tokens=0) is not None
    run_step(cache, "a", 200, 1)
    cache.add("b", text(200))
    assert cache.match("b", kv_tokens=100).losses == {E: 192, G: 7}


def test_an_eviction_is_forgotten_when_the_state_was_stored_again() -> None:
    prompt = text(30)
    d = run([Job(prompt, 50)], max_num_seqs=1)
    while d.cache.committed() and d.cache._states.evict():
        pass
    later = [Job(prompt, 110), Job(prompt + answer(prompt, 40, attention=True) + [1])]  # gives the state up for 128
    for job in later:
        d.mix.jobs.append(job)
        d.submit(len(d.mix.jobs) - 1)
        while not d.scheduler.idle:
            d.step()
    report = d.requests[2, 0].report
    assert report is not None and report.losses == {N: 64, G: 6}


def test_no_capacity() -> None:
    # Two blocks: src and dst of the second step leave none for the tail.
    jobs = [Job(text(300), marks=(64,)), Job(text(300))]
    assert losses({"num_state_blocks": 2, "budget": 8192}, *jobs)[1] == {G: 43}
    assert losses({"max_checkpoints": 1, "num_state_blocks": 2}, *jobs)[1] == {G: 43}
    assert losses({"max_checkpoints": 0}, *jobs)[1] == {C: 256, G: 43}
    assert losses({"max_checkpoints": 0, "budget": 64}, *jobs)[1] == {C: 256, G: 43}


def test_only_near() -> None:
    for kind in ({}, {"has_attention": False, "num_kv_blocks": 0}):
        options = {"strict_reuse": True, "budget": 7, **kind}
        assert losses(options, Job(text(300)), Job(text(300)))[1] == {Loss.ONLY_NEAR: 256, G: 43}


def test_not_asked_for() -> None:
    assert losses({}, Job(text(300)), Job(text(300), read=False))[1] == {Loss.NOT_ASKED: 299}


def test_a_preempted_request_keeps_its_first_report() -> None:
    jobs = [Job(text(100, seed), 150) for seed in range(3)]
    d = run(jobs, num_kv_blocks=6)
    assert d.cache.stats.preemptions > 0
    assert [d.requests[i, 0].report for i in range(3)] == [RequestReport(100, 0, 0, {})] * 3
    assert d.cache.stats.requests == 3


def test_a_ceiling_counts_what_runs_now_and_what_was_aborted() -> None:
    d = run([Job(text(300), aborts=2), Job(text(300), arrives=2), Job(text(300), arrives=3, read=False)], budget=100)
    reports = [d.requests[i, 0].report for i in range(3)]
    assert [report.ceiling for report in reports if report is not None] == [0, 128, 192]


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_common_tokens() -> None:
    rng = random.Random(0)
    for _ in range(500):
        a, b = (array("i", (rng.randrange(2) << 20 for _ in range(rng.randrange(40)))) for _ in range(2))
        cut = rng.randrange(20)
        b[:cut] = a[:cut]
        assert common_tokens(a.tobytes(), b.tobytes()) == shared(a, b)


def recorded(record: ComputedRecord, tokens: list[int]) -> None:
    values = array("i", tokens)
    chain = [root_hash()]
    extend_chain(chain, values, 4)
    for i, block_hash in enumerate(chain[1:]):
        record.add(chain[i], values[4 * i : 4 * i + 4].tobytes(), block_hash)
    record.add(chain[-1], values[len(values) // 4 * 4 :].tobytes())
    record.touch(chain)


def longest(record: ComputedRecord, tokens: list[int]) -> int:
    values = array("i", tokens)
    chain = [root_hash()]
    extend_chain(chain, values, 4)
    return record.longest(chain, values.tobytes())


def test_the_record_finds_the_longest_prefix() -> None:
    rng = random.Random(0)
    record, done = ComputedRecord(4, 1 << 20), []
    for _ in range(300):
        tokens = [rng.choice([1, 256, 1 << 24]) for _ in range(rng.randrange(1, 14))]
        assert longest(record, tokens) == max((shared(other, tokens) for other in done), default=0)
        recorded(record, tokens)
        done.append(tokens)


def test_the_record_is_bounded_and_forgets_the_ends_of_old_chains_first() -> None:
    record = ComputedRecord(4, 20)
    recorded(record, [1] * 12)
    recorded(record, [2] * 12)
    assert longest(record, [2] * 12) == 12
    assert longest(record, [1] * 12) < 12
    assert record._num_tokens <= 20
    record.set_fate(b"a", E)
    assert record.fate(b"a") is E
    for i in range(10):
        record.set_fate(bytes([i]), C)
    assert record.fate(b"a") is None and len(record._fates) <= 5
    record.clear_fate(bytes([9]))
    assert record.fate(bytes([9])) is None


def test_losses_add_up_with_a_record_of_few_tokens() -> None:
    rng = random.Random(0)
    cache = PrefixCache(CacheConfig(num_state_blocks=6, num_kv_blocks=9, record_tokens=300, max_seen_blocks=2))
    for i in range(100):
        name, prompt = str(i), text(rng.choice([64, 130, 200])) + text(rng.randrange(100), rng.randrange(4))
        cache.add(name, prompt)
        hit = cache.admit(name)
        assert hit is not None
        step = cache.allocate(name, len(prompt) - hit.num_tokens)
        assert step is not None
        plan = cache.plan([step])
        cache.issued(plan)
        cache.accept(plan, {name: [1]})
        cache.free(name, finished=True)
    stats = cache.stats
    assert sum(stats.losses.values()) == stats.ceiling_tokens - stats.hit_tokens
    assert 0 < stats.hit_tokens < stats.ceiling_tokens
    assert cache._record._num_tokens <= 300 and len(cache._record._fates) <= 300 // 64 + 1


def test_events_tell_where_a_prefix_is_cached() -> None:
    cache = PrefixCache(CacheConfig(num_state_blocks=4, num_kv_blocks=4))
    cache.add("a", text(130))
    assert cache.admit("a") is not None
    step = cache.allocate("a", 130)
    assert step is not None
    plan = cache.plan([step])
    assert cache.take_events() == []  # nothing is readable before the step is issued
    cache.issued(plan)
    events = cache.take_events()
    assert [(e.action, e.kind, e.num_tokens, e.request_id) for e in events] == [
        ("stored", "state", 128, "a"), ("stored", "kv", 64, "a"), ("stored", "kv", 128, "a"),
    ]  # fmt: skip
    assert events[0].block_hash == events[2].block_hash != events[1].block_hash
    assert cache.take_events() == []
    cache.accept(plan, {"a": [1]})
    cache.free("a", finished=True)
    cache.reset()
    assert sorted((e.action, e.kind, e.num_tokens) for e in cache.take_events()) == [
        ("removed", "kv", 0), ("removed", "kv", 0), ("removed", "state", 0),
    ]  # fmt: skip


def test_the_stats_count_blocks_by_status() -> None:
    cache = PrefixCache(CacheConfig(num_state_blocks=4, num_kv_blocks=5))
    cache.add("a", text(130))
    assert cache.admit("a") is not None
    step = cache.allocate("a", 130)
    assert step is not None
    plan = cache.plan([step])
    assert cache.stats.state_blocks == {"free": 2, "writing": 2, "committed": 0, "evictable": 0}
    cache.issued(plan)
    assert cache.stats.state_blocks == {"free": 2, "writing": 1, "committed": 1, "evictable": 1}
    assert cache.stats.kv_blocks == {"free": 2, "writing": 1, "committed": 2, "evictable": 0}
    host = PrefixCache(CacheConfig(num_state_blocks=4))
    assert host.stats.kv_blocks == {}
