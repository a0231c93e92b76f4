"""vLLM's OffloadingConnector beside states: its scheduler is real, and another worker copies."""

from __future__ import annotations

from pathlib import Path

import pytest
from connectors import SimulatedOffloading
from scheduler_mixes import random_mix, random_tokens
from simulation import HAS_LOOKAHEAD, Simulation, make_scheduler
from watched import run_to_its_end

PAGE_BYTES = 64 * 8 * 2 * 4


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_state_and_kv_come_back_together(budget: int, ahead: bool) -> None:
    """Ask for prompts twice with room for few pages. `budget` has vLLM load within the step, from 0.33 on."""
    options = {"cpu_bytes_to_use": 100 * PAGE_BYTES, "seed": 0, "slow": 0.5, "sync_load_budget_bytes": budget}
    scheduler = make_scheduler(5, 9, budget=512, ahead=ahead, v2=ahead, host_states=100, connector=options)
    simulation = Simulation(scheduler, ahead=ahead)
    prompts = [random_tokens(200, seed) for seed in range(8)]
    for number, prompt in enumerate(prompts + prompts):
        simulation.add(str(number), prompt, 2)
        simulation.drain()
    connector = simulation.worker.connector
    assert isinstance(connector, SimulatedOffloading)
    assert [simulation.cached[str(number)] for number in range(8, 16)] == [192] * 8
    assert connector.loaded >= 6
    simulation.check_end()


@pytest.mark.parametrize("part", range(4))
def test_random_requests(part: int) -> None:
    loaded = flushed = 0
    for seed in range(9 * part, 9 * part + 9):
        options = {
            "cpu_bytes_to_use": (1 << 30, 64 * PAGE_BYTES)[seed % 2],
            "seed": seed,
            "slow": (0.0, 0.5, 0.9)[seed // 2 % 3],
            "sync_load_budget_bytes": (0, 0, 1 << 20)[seed // 3 % 3],
        }
        simulation = random_mix(seed, again=True, host_states=(50, 3, 50, 0)[seed % 4], connector=options)
        simulation.check_end()
        connector = simulation.worker.connector
        assert isinstance(connector, SimulatedOffloading)
        loaded, flushed = loaded + connector.loaded, flushed + connector.flushed
    assert loaded and flushed


@pytest.mark.skipif(HAS_LOOKAHEAD, reason="vLLM 0.33 runs on no CPU here")
@pytest.mark.parametrize("mode", ["connector", "size"])
def test_a_model_answers_from_host_memory(mode: str, tmp_path: Path) -> None:
    run_to_its_end(tmp_path / "log", "offload_run.py", mode)
