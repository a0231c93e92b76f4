"""Check the report: lost tokens with their causes, and the record behind the ceiling."""

from __future__ import annotations

import random

import pytest

from cache_calls import allocate, make, run_step, started
from mambacache.cache.ledger import MAX_EVENTS, Ledger, partition_loss
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig
from mambacache.report import Hit, Loss, RequestReport
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


def test_no_state_stored() -> None:
    # The tail of the first prompt lies beyond the shared tokens.
    assert losses({}, Job(text(300)), Job([*text(200), text(201)[-1] ^ 1], arrives=20))[1] == {N: 192, G: 8}


def test_evicted_state() -> None:
    others = [Job(text(400, seed), 1) for seed in range(1, 5)]  # each saves more than the first
    again = Job(text(300), arrives=40)  # an earlier arrival would wait, and keep the state
    assert losses({"num_state_blocks": 3}, Job(text(300)), *others, again)[-1] == {E: 256, G: 43}


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
    while d.cache.committed() and d.cache.states.evict():
        pass
    later = [Job(prompt, 110), Job(prompt + answer(prompt, 40, attention=True) + [1])]  # gives its state at 64 up
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


def test_a_ceiling_counts_running_and_aborted_requests() -> None:
    d = run([Job(text(300), aborts=2), Job(text(300), arrives=2), Job(text(300), arrives=3, read=False)], budget=100)
    reports = [d.requests[i, 0].report for i in range(3)]
    assert [report.ceiling for report in reports if report is not None] == [0, 128, 192]


def test_losses_add_up_with_a_record_of_few_tokens() -> None:
    rng = random.Random(0)
    cache = PrefixCache(CacheConfig(num_state_blocks=6, num_kv_blocks=9, record_tokens=300, max_seen_blocks=2))
    for i in range(100):
        name, prompt = str(i), text(rng.choice([64, 130, 200])) + text(rng.randrange(100), rng.randrange(4))
        cache.add(name, prompt)
        hit = cache.admit(name)
        assert isinstance(hit, Hit)
        step = cache.allocate(name, len(prompt) - hit.num_tokens)
        assert step is not None
        plan = cache.plan([step])
        cache.issued(plan.steps)
        cache.accept(plan.steps, {name: [1]})
        cache.free(name, finished=True)
    stats = cache.stats
    assert sum(stats.losses.values()) == stats.ceiling_tokens - stats.hit_tokens
    assert 0 < stats.hit_tokens < stats.ceiling_tokens
    assert cache._admission.ledger._record.num_tokens <= 300 and len(cache._admission.ledger._fates) <= 300 // 64 + 1


def test_events_tell_where_a_prefix_is_cached() -> None:
    cache = PrefixCache(CacheConfig(num_state_blocks=4, num_kv_blocks=4))
    cache.add("a", text(130))
    assert isinstance(cache.admit("a"), Hit)
    step = cache.allocate("a", 130)
    assert step is not None
    plan = cache.plan([step])
    assert cache.take_events() == []  # nothing is readable before the step is issued
    cache.issued(plan.steps)
    events = cache.take_events()
    assert [(e.action, e.kind, e.num_tokens, e.request_id) for e in events] == [
        ("stored", "state", 128, "a"), ("stored", "kv", 64, "a"), ("stored", "kv", 128, "a"),
    ]  # fmt: skip
    assert events[0].block_hash == events[2].block_hash != events[1].block_hash
    assert cache.take_events() == []
    cache.accept(plan.steps, {"a": [1]})
    cache.free("a", finished=True)
    cache.reset()
    assert sorted((e.action, e.kind, e.num_tokens) for e in cache.take_events()) == [
        ("removed", "kv", 0), ("removed", "kv", 0), ("removed", "state", 0),
    ]  # fmt: skip


def test_the_stats_count_blocks_by_status() -> None:
    cache = PrefixCache(CacheConfig(num_state_blocks=4, num_kv_blocks=5))
    cache.add("a", text(130))
    assert isinstance(cache.admit("a"), Hit)
    step = cache.allocate("a", 130)
    assert step is not None
    plan = cache.plan([step])
    assert cache.stats.state_blocks == {"free": 2, "writing": 2, "committed": 0, "evictable": 0}
    cache.issued(plan.steps)
    assert cache.stats.state_blocks == {"free": 2, "writing": 1, "committed": 1, "evictable": 1}
    assert cache.stats.kv_blocks == {"free": 2, "writing": 1, "committed": 2, "evictable": 0}
    host = PrefixCache(CacheConfig(num_state_blocks=4))
    assert host.stats.kv_blocks == {}


def test_the_stats_are_a_snapshot() -> None:
    cache = make()
    before = cache.stats
    started(cache, "a", text(130))
    run_step(cache, "a", 130, 1)
    assert (before.requests, before.prompt_tokens, sum(before.state_blocks.values())) == (0, 0, 16)
    before.losses[Loss.EVICTED] = 7
    assert cache.stats.requests == 1 and cache.stats.losses[Loss.EVICTED] == 0


def test_event_numbers_show_a_gap_where_events_were_lost() -> None:
    ledger = Ledger(64, 1000, on=True)
    for i in range(MAX_EVENTS + 5):
        ledger.stored("kv", i.to_bytes(16, "big"), 64, "a")
    events = ledger.take_events()
    assert len(events) == MAX_EVENTS and events[0].number == 7  # numbers begin at 2
    ledger.removed("kv", bytes(16), evicted=False)
    assert ledger.take_events()[0].number == events[-1].number + 1


def test_the_fates_of_states_are_bounded() -> None:
    ledger = Ledger(4, 20, on=True)
    ledger.removed("state", b"a", evicted=True)
    assert ledger.fate(b"a") is Loss.EVICTED
    for i in range(10):
        ledger.refused(bytes([i]))
    assert ledger.fate(b"a") is None and len(ledger._fates) <= 5
    ledger.stored("state", bytes([9]), 4, "a")
    assert ledger.fate(bytes([9])) is None


def test_without_accounting_the_same_is_cached_and_nothing_is_told() -> None:
    caches = [make(accounting=on) for on in (True, False)]
    for cache in caches:
        for name in "ab":
            started(cache, name, text(200))
            run_step(cache, name, cache.progress(name).prefill_end - cache.progress(name).computed, 1)
    told, silent = caches
    assert told.stats.requests == 2 and told.take_events()
    assert silent.stats.requests == 0 and silent.take_events() == []
    assert silent.report("b") == RequestReport(200, 192, 192, {})
    assert [cache.stats.state_blocks for cache in caches] == [told.stats.state_blocks] * 2


def test_a_withdrawn_admission_leaves_no_report() -> None:
    cache = make()
    started(cache, "a", text(200))
    allocate(cache, "a", 200)
    cache.withdraw("a")
    cache.check()
    assert cache.report("a") is None and cache.stats.requests == cache.stats.preemptions == 0
    assert cache.stats.state_blocks["free"] == 16
    assert isinstance(cache.admit("a"), Hit)
    run_step(cache, "a", 200, 1)
    with pytest.raises(RuntimeError, match="request 'a' has run since its admission: preempt it instead"):
        cache.withdraw("a")
    assert cache.stats.requests == 1
