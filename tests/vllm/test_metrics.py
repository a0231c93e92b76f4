"""Check the scheduler's reports on its cache: a log line each minute, and counters that another process shows."""

from __future__ import annotations

import copy
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sequences import VOCABULARY
from simulation import Simulation, make_scheduler, model_config

from mambacache.report import CacheStats, Loss
from mambacache.vllm import metrics, scheduler


def shown(vllm_config: Any) -> dict[str, float]:
    """Return the counters that a front end shows, if this is its last configuration."""
    registry, collector = CollectorRegistry(), metrics.Shown()
    collector.instance_id = vllm_config.instance_id
    registry.register(collector)
    return {
        " ".join([sample.name, *(sample.labels[each] for each in ("engine", "reason") if each in sample.labels)]): (
            sample.value
        )
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def run(simulation: Simulation) -> None:
    """Run prompts that lose tokens for several reasons.

    One prompt must not be read from the cache. The prompts in the middle evict one another, and the last of them
    repeats the first.
    """
    rng = random.Random(0)
    shared = [rng.randrange(VOCABULARY) for _ in range(300)]
    others = [[rng.randrange(VOCABULARY) for _ in range(130)] for _ in range(7)]
    prompts = [*([*shared, number] for number in range(4)), *others, others[0], [*shared, 11]]
    for number, prompt in enumerate(prompts):
        simulation.add(str(number), prompt, 2, **({"prompt_logprobs": 0} if number == 2 else {}))
        simulation.drain()


def counted(stats: CacheStats, engine: int) -> dict[str, float]:
    return {
        f"mambacache:prompt_tokens_total {engine}": stats.prompt_tokens,
        f"mambacache:hit_tokens_total {engine}": stats.hit_tokens,
        f"mambacache:ceiling_tokens_total {engine}": stats.ceiling_tokens,
        **{f"mambacache:lost_tokens_total {engine} {reason}": stats.losses[reason] for reason in Loss},
    }


def test_totals_are_shown_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(make_scheduler(4))
    config, states = simulation.scheduler.vllm_config, simulation.scheduler.prefix_cache
    assert shown(config) == {}
    monkeypatch.setattr(scheduler, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(scheduler.logger, "propagate", True)
    scheduler.logger.addHandler(caplog.handler)
    scheduler.logger.setLevel(logging.INFO)
    run(simulation)
    stats = states.stats
    assert {reason for reason, lost in stats.losses.items() if lost} >= {Loss.GRANULARITY, Loss.NOT_ASKED, Loss.EVICTED}
    assert stats.hit_tokens
    assert shown(config) == counted(stats, 0)

    second = copy.copy(config)
    second.parallel_config = copy.copy(config.parallel_config)
    second.parallel_config.data_parallel_index = 1
    metrics.Counters(second).tell(states, idle=True)
    assert shown(config) == counted(stats, 0) | counted(stats, 1)

    losses = ", ".join(f"{reason}: {lost:,}" for reason, lost in stats.losses.items() if lost)
    assert caplog.messages[-1] == (
        f"mambacache: {stats.hit_tokens:,} of {stats.prompt_tokens:,} prompt tokens hit so far, of "
        f"{stats.ceiling_tokens:,} that had been computed before; lost, by reason: {losses}"
    )


def test_files_are_written_once_a_second_and_when_all_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulation = Simulation(make_scheduler())
    config = simulation.scheduler.vllm_config
    now = [1000.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])

    def told() -> float:
        simulation.step()
        return shown(config)["mambacache:prompt_tokens_total 0"]

    simulation.add("0", [1] * 70, 9)
    assert told() == 70
    simulation.add("1", [2] * 70, 9)
    assert told() == 70
    now[0] += metrics.SECONDS
    assert told() == 140
    simulation.add("2", [3] * 70, 1)
    assert told() == 140
    simulation.drain()
    assert shown(config)["mambacache:prompt_tokens_total 0"] == 210

    (file,), counters = tmp_path.rglob("*.prom"), simulation.scheduler._counters
    file.write_text("")
    counters.tell(simulation.scheduler.prefix_cache, idle=True)
    assert file.read_text() == "", "nothing has changed, and the file was written again"


def test_a_full_disk_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model_config()  # made before, since it takes a temporary folder once
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    simulation = Simulation(make_scheduler())
    simulation.add("0", [1] * 70, 2)
    simulation.drain()
    simulation.check_end()
