"""States in host memory: vLLM's scheduler with ours around it, on workers whose copies take long or fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from scheduler_mixes import random_mix, random_tokens
from simulation import Simulation, make_scheduler

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig
from mambacache.vllm import transfers
from mambacache.vllm.transfers import Copies, Ends


@pytest.mark.parametrize("part", range(6))
def test_random_requests(part: int) -> None:
    """Copies take long and fail on some rank, amid aborts, preemptions and resets."""
    loads = failed = 0
    for seed in range(10 * part, 10 * part + 10):
        simulation = random_mix(seed, again=True, host_states=(1, 3, 50)[seed % 3], ranks=1 + seed % 2)
        simulation.check_end()
        stats = simulation.scheduler.prefix_cache.stats
        loads, failed = loads + stats.loads, failed + stats.failed_transfers
    assert loads and failed, (loads, failed)


def asked(prompts: list[list[int]], *, num_states: int = 5, **chances: float) -> Simulation:
    """Send prompts one by one, with room for few states on the device and for many pages and states on the host."""
    simulation = Simulation(make_scheduler(num_states, host_states=100, ranks=2), **chances)
    for number, prompt in enumerate(prompts):
        simulation.add(str(number), prompt, 2)
        simulation.drain()
    return simulation


PROMPTS = [random_tokens(200, seed) for seed in range(8)]


def test_a_state_that_the_device_evicted_comes_back() -> None:
    simulation = asked(PROMPTS + PROMPTS)
    assert [simulation.cached[str(number)] for number in range(16)] == [0] * 8 + [192] * 8
    stats = simulation.scheduler.prefix_cache.stats
    assert stats.loads >= 5 and stats.host_hit_tokens == 192 * stats.loads
    simulation.check_end()


def test_a_state_is_lost_without_host_memory() -> None:
    simulation = Simulation(make_scheduler(5))
    for number, prompt in enumerate(PROMPTS + PROMPTS):
        simulation.add(str(number), prompt, 2)
        simulation.drain()
    assert sum(simulation.cached.values()) < 8 * 192


def test_copies_that_fail_on_a_rank_cost_a_miss() -> None:
    simulation = asked(PROMPTS + PROMPTS, failing=0.3)
    assert 0 < sum(simulation.cached.values()) < 8 * 192
    assert simulation.worker.host is not None and simulation.worker.host.failed > 5
    assert simulation.scheduler.prefix_cache.stats.failed_transfers > 3
    simulation.check_end()


def test_other_requests_run_while_a_state_comes_back() -> None:
    simulation = asked(PROMPTS)
    host = simulation.worker.host
    assert host is not None
    host._slow = 1.0
    simulation.add("waits", PROMPTS[0], 2)
    simulation.add("runs", random_tokens(70, 99), 2)
    for _ in range(6):
        simulation.step()
    assert "runs" in simulation.finish_reasons and not simulation.answers["waits"]
    host.end(all_transfers=True)
    simulation.drain()
    assert simulation.cached["waits"] == 192
    simulation.check_end()


def test_a_reset_amid_a_load() -> None:
    simulation = asked(PROMPTS)
    host = simulation.worker.host
    assert host is not None
    host._slow = 1.0
    simulation.add("again", PROMPTS[0], 2)
    simulation.step()
    assert host._under_way
    assert simulation.scheduler.reset_prefix_cache()
    simulation.drain()
    assert simulation.cached["again"] == 0
    assert not simulation.scheduler.prefix_cache.stats.host_states["committed"]
    simulation.check_end()


def configured(tmp_path: Path, ranks: int) -> SimpleNamespace:
    return SimpleNamespace(
        instance_id=tmp_path.name, parallel_config=SimpleNamespace(data_parallel_index=3, world_size=ranks)
    )


def test_a_transfer_is_over_once_all_ranks_say_so(tmp_path: Path) -> None:
    config = configured(tmp_path, 3)
    first = [Ends(config, rank, new=True) for rank in range(3)]
    second = [Ends(config, rank, new=False) for rank in range(3)]
    first[0].note(1, False)
    first[1].note(1, True)
    first[0].note(1 + transfers.MOST, False)
    assert [each.failed(1) for each in second] == [None, True, None]
    assert [each.failed(1 + transfers.MOST) for each in second] == [False, None, None]
    assert Ends(config, 0, new=True).failed(1 + transfers.MOST) is None, "a new worker begins anew"


def test_a_rank_on_another_machine_is_refused(tmp_path: Path) -> None:
    config, cache = configured(tmp_path, 2), PrefixCache(CacheConfig(num_state_blocks=2))
    Ends(config, 0, new=True)
    with pytest.raises(ValueError, match="which may run on another machine: leave state_host_bytes out of"):
        Copies.of(config, cache, None)


def test_no_more_transfers_are_sent_than_a_file_has_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is taken twice would hide the end of the older transfer."""
    monkeypatch.setattr(transfers, "MOST", 2)
    under_way = [SimpleNamespace(number=number) for number in (5, 6, 7, 8)]
    ended: list[int] = []
    cache = SimpleNamespace(
        transfers=lambda flush: tuple(under_way), transferred=lambda each, failed: ended.append(each.number)
    )
    over: dict[int, bool] = {}
    copies = Copies(cache, [SimpleNamespace(failed=over.get)])  # type: ignore[arg-type, list-item]
    assert [each.number for each in copies.begin(idle=False)] == [5, 6] and copies.begin(idle=False) == ()
    over[6] = False
    copies.end()
    del under_way[1]
    assert ended == [6] and copies.begin(idle=False) == ()
    over[5] = False
    copies.end()
    del under_way[0]
    assert [each.number for each in copies.begin(idle=False)] == [7, 8]


@pytest.mark.parametrize("part", range(3))
def test_random_requests_with_files(part: int, tmp_path: Path) -> None:
    """The second of two processes finds the files of the first, amid failures on some rank and resets."""
    hits = failed = 0
    for seed in range(10 * part, 10 * part + 10):
        for _ in range(2):
            simulation = random_mix(
                seed, again=True, host_states=(3, 8)[seed % 2], ranks=1 + seed % 2, disk=tmp_path / str(seed)
            )
            simulation.check_end()
            stats = simulation.scheduler.prefix_cache.stats
            hits, failed = hits + stats.disk_hit_tokens, failed + stats.failed_transfers
            simulation.scheduler.shutdown()
    assert hits and failed, (hits, failed)
