"""Run random mixes with a tier in host memory: no wrong state or KV on either side, no leak, no stall.

Transfers end late and in any order, fail, and are overtaken by resets, aborts, preemptions and failing steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambacache.cache.host_tier import Loads
from mambacache.cache.lookup import Found
from mambacache.config import CacheConfig
from mambacache.plan import Transfer
from mixes import mixes
from symbolic import text
from symbolic_jobs import Job, Mix
from symbolic_tier import HostMemory, TieredCache, TieredDriver, tiered
from test_properties import any_mix
from test_properties_faults import PACKAGE, Faults, FaultyDriver, faulty_mixes
from test_properties_host import Host
from test_properties_illegal import IllegalHost

TIER = (str(PACKAGE / "cache" / "host_tier.py"),)


@st.composite
def tiers(draw: st.DrawFn, attention: bool) -> dict[str, int]:
    """Draw the `CacheConfig` fields of a tiny or roomy tier."""
    worth = draw(st.sampled_from([{}, {}, {"state_bytes": 6400, "page_bytes": 640, "host_bytes_per_token": 60}]))
    pages = draw(st.sampled_from([1, 3, 12, 200])) if attention else 0
    return {"num_host_states": draw(st.sampled_from([1, 2, 5, 50])), "num_host_pages": pages, **worth}


@st.composite
def tiered_mixes(draw: st.DrawFn, faults: bool = False) -> tuple[Mix, dict[str, Any]]:
    """Draw a mix with prompts that come back late, after the device has evicted them."""
    mix = draw(any_mix(drafts=draw(st.integers(0, 3)) == 0, faults=faults))
    again = [Job(list(job.prompt), job.max_tokens, job.arrives + 15, salt=job.salt) for job in mix.jobs]
    mix.jobs += again[: draw(st.integers(0, 6))]
    cache = mix.cache
    cache |= draw(tiers(bool(cache["num_kv_blocks"])))
    least = max(-(-(len(job.prompt) + job.max_tokens) // cache["block_size"]) for job in mix.jobs)
    if cache["num_kv_blocks"] and "slab" not in cache:
        cache["num_kv_blocks"] = draw(st.sampled_from([least, least + 1, least + 4, 60]))
    chance = {
        "seed": draw(st.integers(0, 1 << 30)),
        "failing": draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        "slow": draw(st.sampled_from([0.0, 0.5, 0.9])),
    }
    return mix, chance


@mixes(200)
@given(tiered_mixes())
def test_any_mix_with_a_tier(tiered: tuple[Mix, dict[str, Any]]) -> None:
    TieredDriver(tiered[0], **tiered[1]).run()


@mixes(200)
@given(tiered_mixes(faults=True))
def test_any_mix_with_a_tier_failing_steps_and_resets(tiered: tuple[Mix, dict[str, Any]]) -> None:
    TieredDriver(tiered[0], **tiered[1]).run()


class FaultyTieredDriver(FaultyDriver, TieredDriver):
    """Plant faults on any line of the cache and of its tier.

    After a call that raised, the caller asks `transfers` for the transfers in flight.
    """

    def __init__(self, mix: Mix, faults: Faults, **chance: Any) -> None:
        TieredDriver.__init__(self, mix, **chance)
        self.faults = faults
        self.under_way = []
        self.ended: dict[Transfer, bool] = {}  # ended on the device, not reported yet

    def step(self) -> None:
        memory, rng = self.cache.memory, self.cache.rng
        try:
            for number, transfer in list(memory.launched.items()):
                if rng.random() > self.cache.slow:
                    self.ended[transfer] = memory.end(number, failed=False)
            with self.faults.planted():
                self.tell()
        except self.faults.kinds:
            pass
        FaultyDriver.step(self)

    def tell(self) -> None:
        found = self.scheduler.transfers(self.ended)
        self.ended = {}
        for transfer in found:
            if transfer.number not in self.cache.memory.launched:
                self.cache.memory.launch(transfer)

    def run(self) -> FaultyTieredDriver:
        super().run()
        return self

    def check(self) -> None:
        self.tell()
        super().check()


@st.composite
def faulty(draw: st.DrawFn) -> tuple[Mix, Faults, dict[str, Any]]:
    """Draw a mix and faults. Half of the faults fall in the tier alone, since few lines are in the tier."""
    mix, chance = draw(tiered_mixes())
    _, faults = draw(faulty_mixes())
    if draw(st.booleans()):
        faults = Faults(draw(st.integers(0, 1 << 30)), draw(st.sampled_from([50, 150])), faults.kinds, TIER)
    return mix, faults, {**chance, "failing": 0.0}


@mixes(80)
@given(faulty())
def test_a_fault_on_any_line_costs_no_answer_and_no_block(faulty: tuple[Mix, Faults, dict[str, Any]]) -> None:
    mix, faults, chance = faulty
    FaultyTieredDriver(mix, faults, **chance).run()


@pytest.mark.full
def test_faults_are_planted_all_over_the_tier() -> None:
    places: set[tuple[str, int]] = set()
    for seed in range(60):
        jobs = [Job(text(250, i % 3) + text(30, i), 6, arrives=3 * i) for i in range(9)]
        cache = {"num_state_blocks": 5, "num_kv_blocks": 12, "num_host_states": 9, "num_host_pages": 30}
        faults = Faults(seed, 150, (KeyboardInterrupt,), TIER)
        places |= FaultyTieredDriver(Mix(jobs, max_num_seqs=2, cache=cache), faults, seed=seed).run().faults.places
    assert len(places) > 80


class IllegalTieredHost(IllegalHost):
    """End transfers at any time, also ended transfers and unknown transfers."""

    def __init__(self, seed: int, config: CacheConfig) -> None:
        super().__init__(seed, config)
        self.cache: TieredCache = TieredCache(config, seed)
        self.cache.runner.propose = self.propose
        self.ended_transfers: list[Transfer] = []
        self.ended = self.loads = 0

    def attempt(self, move: Any) -> None:
        for _ in range(self.rng.choice([0, 1, 1, 2])):
            super().attempt(self.rng.choice([self.launch, self.launch, self.end, self.end, self.end_wrongly]))
        super().attempt(move)
        self.loads += sum(not transfer.to_host for transfer in self.cache.memory.launched.values())

    def launch(self) -> None:
        self.cache.launch()

    def end(self) -> None:
        launched = self.cache.memory.launched
        if launched:
            number, transfer = self.rng.choice(list(launched.items()))
            failed = self.cache.memory.end(number, self.rng.random() < 0.2)
            self.cache.transferred(transfer, failed=failed)
            self.ended_transfers.append(transfer)
            self.ended += 1

    def end_wrongly(self) -> None:
        made_up = Transfer(self.rng.randint(-1, 99), True, ((99, 99),), ())
        self.cache.transferred(self.rng.choice([*self.ended_transfers[-3:], made_up]))
        raise AssertionError("a transfer that is not under way ends")

    def finish(self) -> None:
        self.cache.launch()
        self.cache.finish(all_transfers=True)
        for name in [each for each in self.cache.request_ids if self.cache.knows(each)]:
            self.cache._admission.requests[name].may_load = False  # the base class does not wait for loads
        super().finish()


class TieredHost(Host):
    """Keep the KV outside of the cache, any part of which may be gone at any admission."""

    def __init__(self, seed: int, config: CacheConfig, ahead: bool, **chance: Any) -> None:
        super().__init__(seed, config, ahead)
        self.cache: TieredCache = TieredCache(config, seed, **chance)

    def step(self) -> None:
        self.cache.finish()
        super().step()
        self.cache.launch()
        if not self.running and not self.plans:
            self.cache.finish(all_transfers=True)


@st.composite
def hosts_with_kv(draw: st.DrawFn) -> tuple[int, CacheConfig, bool, dict[str, float]]:
    drafts = draw(st.sampled_from([0, 0, 3]))
    config = CacheConfig(
        num_state_blocks=draw(st.sampled_from([drafts + 3, 6, 8])),
        max_draft_tokens=drafts,
        checkpoint_interval=draw(st.sampled_from([0, 64])),
        strict_reuse=draw(st.sampled_from([False, False, True])),
        **draw(tiers(attention=False)),
    )
    chance = {"failing": draw(st.sampled_from([0.0, 0.3, 1.0])), "slow": draw(st.sampled_from([0.0, 0.5, 0.9]))}
    return draw(st.integers(0, 1 << 30)), config, not drafts and draw(st.booleans()), chance


@mixes(300)
@given(hosts_with_kv())
def test_any_host_with_kv_and_a_tier_of_states(host: tuple[int, CacheConfig, bool, dict[str, float]]) -> None:
    seed, config, ahead, chance = host
    TieredHost(seed, config, ahead, **chance).run(8)


@pytest.mark.full
def test_hosts_with_kv_load_states() -> None:
    hosts = [
        TieredHost(seed, CacheConfig(num_state_blocks=4, num_host_states=9, checkpoint_interval=64), False)
        for seed in range(20)
    ]
    for host in hosts:
        host.run(12)
    assert sum(host.cache.stats.loads for host in hosts) > 20
    assert sum(host.cache.stats.host_hit_tokens for host in hosts) > 400


@st.composite
def illegal_hosts(draw: st.DrawFn) -> tuple[int, CacheConfig]:
    attention = draw(st.booleans())
    config = CacheConfig(
        num_state_blocks=draw(st.sampled_from([6, 8])),
        max_draft_tokens=draw(st.sampled_from([0, 3])),
        max_checkpoints=draw(st.sampled_from([None, None, 0, 2])),
        has_attention=attention,
        num_kv_blocks=draw(st.sampled_from([6, 9, 20])) * attention,
        **draw(tiers(attention)),
    )
    return draw(st.integers(0, 1 << 30)), config


@mixes(120)
@given(illegal_hosts())
def test_any_illegal_host_with_a_tier(host: tuple[int, CacheConfig]) -> None:
    IllegalTieredHost(*host).run(200)


@pytest.mark.full
def test_an_illegal_host_copies_both_ways() -> None:
    hosts = [
        IllegalTieredHost(seed, CacheConfig(num_state_blocks=6, num_kv_blocks=9, num_host_states=9, num_host_pages=40))
        for seed in range(70)
    ]
    for host in hosts:
        host.run(600)
    assert sum(host.ended for host in hosts) > 150 and sum(host.cache.stats.loads for host in hosts) > 4


def test_mixes_load_from_the_host() -> None:
    """Check that mixes load, also with failed and void transfers."""
    rng = random.Random(0)
    stems = [text(300, i) for i in range(8)]
    jobs = [Job(stems[rng.randrange(8)] + text(20, 9 + i), 8, arrives=4 * i) for i in range(80)]
    pools: dict[str, Any] = {"num_state_blocks": 6, "num_kv_blocks": 20, "max_num_seqs": 3}
    d = tiered(jobs, **pools)
    assert d.cache.stats.loads > 15 and d.cache.stats.host_hit_tokens > 4000 and d.loading > 15
    failing = tiered(jobs, failing=0.5, **pools).cache.stats
    assert failing.failed_transfers > 20 and failing.loads > 5
    void = tiered(jobs, slow=0.8, resets=frozenset(range(25, 160, 25)), **pools)
    assert void.cache.stats.loads > 3 and void.cache.void > 0


def another_block(transfer: Transfer) -> Transfer:
    return transfer._replace(states=tuple((block % 5 + 1, slot) for block, slot in transfer.states))


def another_slot(transfer: Transfer) -> Transfer:
    return transfer._replace(pages=tuple((block, slot + 1) for block, slot in transfer.pages))


def one_page_fewer(transfer: Transfer) -> Transfer:
    return transfer._replace(pages=transfer.pages[1:])


@pytest.mark.parametrize("planted", [None, another_block, another_slot, one_page_fewer])
@pytest.mark.parametrize("to_host", [True, False])
def test_a_planted_mistake_is_seen(
    planted: Callable[[Transfer], Transfer] | None, to_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer of wrong blocks gives wrong contents, and these raise or change tokens."""
    end = HostMemory.end

    def wrongly(memory: HostMemory, number: int, failed: bool) -> bool:
        transfer = memory.launched[number]
        if planted is not None and transfer.to_host == to_host:
            memory.launched[number] = planted(transfer)
        return end(memory, number, failed)

    monkeypatch.setattr(HostMemory, "end", wrongly)
    jobs = [Job(text(250, i % 4) + text(30, i), 6, arrives=4 * i) for i in range(16)]
    pools: dict[str, Any] = {"num_state_blocks": 6, "num_kv_blocks": 14, "max_num_seqs": 2}
    with pytest.raises((AssertionError, IndexError)) if planted is not None else nullcontext():
        tiered(jobs, **pools)


reach = Loads._depth


def the_state_before(loads: Loads, chain: list[bytes], found: Found, limit: int, filed: bool = False) -> int:
    return reach(loads, chain, found, max(reach(loads, chain, found, limit, filed) - 1, found.hit), filed)


LOST: dict[str, tuple[str, Callable[..., Any]]] = {
    "no fault": ("_depth", reach),
    "the state before the deepest": ("_depth", the_state_before),
    "nothing is loaded": ("fetch", lambda *args: None),
}


@pytest.mark.parametrize("name", LOST)
def test_a_fault_that_loses_hits_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, fault = LOST[name]
    monkeypatch.setattr(Loads, attribute, fault)
    jobs = [Job(text(250, i % 4) + text(30, i), 6, arrives=4 * i) for i in range(24)]
    with pytest.raises(AssertionError) if name != "no fault" else nullcontext():
        tiered(jobs, num_state_blocks=6, num_kv_blocks=24, max_num_seqs=2)
