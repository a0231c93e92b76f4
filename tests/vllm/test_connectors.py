"""A KV connector beside states: vLLM's scheduler with ours around it, loads that come late, in part or not at all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import simulation as simulated
from scheduler_mixes import random_mix, random_tokens
from simulation import Simulation, make_scheduler

from mambacache.vllm import scheduler as plugin

PROMPTS = [random_tokens(200, seed) for seed in range(8)]
HIT = 192


def asked(*, num_pages: int = 9, ahead: bool = False, host_states: int = 100, **chances: Any) -> Simulation:
    """Send prompts one by one, twice, with room for few pages on the device; the connector keeps all of them."""
    scheduler = make_scheduler(
        5, num_pages, budget=512, ahead=ahead, host_states=host_states, connector=chances, v2=ahead
    )
    simulation = Simulation(scheduler, ahead=ahead)
    for number, prompt in enumerate(PROMPTS + PROMPTS):
        simulation.add(str(number), prompt, 2)
        simulation.drain()
    return simulation


def hits(simulation: Simulation) -> list[int]:
    return [simulation.cached[str(number)] for number in range(8, 16)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("between_steps", [0.0, 1.0])
def test_state_and_kv_come_back_together(between_steps: float, ahead: bool) -> None:
    simulation = asked(between_steps=between_steps, ahead=ahead)
    connector = simulation.worker.connector
    assert connector is not None
    assert hits(simulation) == [HIT] * 8
    assert connector.loaded >= 6 and connector.parked == between_steps * connector.loaded
    simulation.check_end()


def test_kv_without_its_state_is_not_loaded() -> None:
    simulation = asked(host_states=0)
    connector = simulation.worker.connector
    assert connector is not None
    assert sum(hits(simulation)) < 4 * HIT
    simulation.check_end()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("partly", [0.0, 1.0])
@pytest.mark.parametrize("between_steps", [0.0, 1.0])
def test_a_failed_load_costs_a_recomputation(between_steps: float, partly: float, ahead: bool) -> None:
    simulation = asked(between_steps=between_steps, failing=1.0, partly=partly, ahead=ahead)
    connector = simulation.worker.connector
    assert connector is not None and connector.failures >= 6
    simulation.check_end()


def abort_after_a_failed_load(simulation: Simulation, name: str) -> None:
    """Abort a request before the scheduler knows that its load failed. Later loads are good."""
    connector = simulation.worker.connector
    assert connector is not None
    connector.chances.failing = 1.0
    simulation.add(name, PROMPTS[0], 2)
    while not connector.failures:
        simulation.step()
    simulation.abort(name)
    simulation.drain()
    connector.chances.failing = 0.0


def test_a_load_that_fails_for_an_aborted_request_leaves_nothing() -> None:
    simulation = asked(between_steps=0.0, ahead=True)
    abort_after_a_failed_load(simulation, "aborted")
    for name in ("again", "and again"):
        simulation.add(name, PROMPTS[0], 2)
        simulation.drain()
    assert simulation.cached["and again"] == HIT
    simulation.check_end()


def on_failing_loads(*, ahead: bool, num_states: int = 8, num_pages: int = 30) -> Simulation:
    """Return a server with states of two prompts, and no KV on its device. Loads are within the step, and fail."""
    scheduler = make_scheduler(num_states, num_pages, budget=1024, ahead=ahead, v2=ahead, connector={"failing": 1.0})
    simulation = Simulation(scheduler, ahead=ahead)
    connector = simulation.worker.connector
    assert connector is not None
    connector.chances.between_steps = connector.chances.partly = 0.0
    for number in range(2):
        simulation.add(f"first{number}", PROMPTS[number], 2)
        simulation.drain()
    manager = scheduler.kv_cache_manager
    manager.evict_blocks({block.block_id for block in manager.block_pool.blocks if block.block_hash is not None})
    return simulation


@pytest.mark.parametrize("ahead", [False, True])
def test_pages_behind_a_failed_load_of_another_request_are_forgotten(ahead: bool) -> None:
    """Request B shares pages that A loads, computes more, and is aborted before the failure is known."""
    simulation = on_failing_loads(ahead=ahead)
    longer, read = PROMPTS[0][:HIT] + random_tokens(100, 9), simulation.read

    def abort_first() -> None:
        simulation.read = read
        simulation.abort("B")
        read()

    simulation.read = abort_first
    simulation.add("A", PROMPTS[0], 4)
    simulation.add("B", longer, 4)
    simulation.step()
    simulation.worker.connector.chances.failing = 0.0
    simulation.drain()
    for name in ("again", "and again"):
        simulation.add(name, longer, 4)
        simulation.drain()
    assert simulation.cached["and again"] == 256
    simulation.check_end()


def test_a_request_that_loads_outlives_the_failure_of_another_load() -> None:
    """Request B loads between steps. Its state is dropped with the failed step, and evicted before the load ends."""
    simulation = on_failing_loads(ahead=True, num_states=6, num_pages=16)
    chances = simulation.worker.connector.chances
    simulation.add("A", PROMPTS[0], 4)
    simulation.step()
    chances.failing, chances.between_steps, chances.slow = 0.0, 1.0, 1.0
    simulation.add("B", PROMPTS[1], 4)
    simulation.step()
    assert simulation.worker.connector.parked == 1 and not simulation.scheduler.prefix_cache.runs("B")
    chances.between_steps = 0.0
    for seed in range(20, 26):
        simulation.add(str(seed), random_tokens(200, seed), 3)
        for _ in range(8):
            simulation.step()
    chances.slow = 0.0
    simulation.drain()
    simulation.check_end()


def test_a_name_may_load_again_after_an_abort() -> None:
    simulation = on_failing_loads(ahead=True)
    abort_after_a_failed_load(simulation, "same")
    simulation.add("same", PROMPTS[1], 2)
    simulation.drain()
    assert simulation.cached["same"] == HIT and simulation.worker.connector.loaded == 1
    simulation.check_end()


def test_an_answer_may_come_late() -> None:
    simulation = asked(unknown=0.7)
    assert hits(simulation) == [HIT] * 8
    simulation.check_end()


def test_a_connector_without_prefix_caching_is_named_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state is kept, so that KV alone cannot be used."""
    said: list[str] = []
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *values: said.append(text % values))
    make_scheduler(connector={})
    assert not said
    make = partial(simulated.CacheConfig, block_size=64)
    monkeypatch.setattr(simulated, "CacheConfig", lambda **_: make(enable_prefix_caching=False))
    make_scheduler(connector={})
    assert said == ["mambacache: the KV connector stores KV that is never loaded: prefix caching is off"]


@pytest.mark.parametrize("part", range(4))
def test_random_requests(part: int) -> None:
    loaded = failures = 0
    for seed in range(20 * part, 20 * part + 20):
        chances = {
            "seed": seed,
            "unknown": (0.0, 0.3)[seed % 2],
            "failing": (0.2, 0.5, 0.8, 0.0)[seed // 2 % 4],
            "lost": (0.0, 0.02)[seed // 3 % 2],
            "slow": (0.2, 0.8)[seed // 5 % 2],
            "between_steps": (0.0, 0.5, 1.0)[seed // 4 % 3],
        }
        simulation = random_mix(seed, again=True, host_states=(50, 3, 50, 0)[seed % 4], connector=chances)
        simulation.check_end()
        connector = simulation.worker.connector
        assert connector is not None
        loaded, failures = loaded + connector.loaded, failures + connector.failures
    assert loaded and failures
