"""Check a user's settings for the plugin, and the number of states that follows from them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.distributed

from mambacache.vllm import sizing
from mambacache.vllm.settings import Settings

CPU = torch.device("cpu")


def configured(
    given: Any, *, rank: int = 0, instance: str = "test", ranks: int = 1, caching: bool = True
) -> SimpleNamespace:
    """Return the part of a vLLM configuration that settings and sizes are read from."""
    return SimpleNamespace(
        additional_config={"mambacache": given},
        instance_id=instance,
        parallel_config=SimpleNamespace(data_parallel_index=rank, world_size=ranks),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9, enable_prefix_caching=caching),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
    )


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, Settings()),
        ({"state_bytes": "20GiB"}, Settings(state_bytes=20 << 30)),
        ({"state_bytes": None, "num_state_blocks": 7}, Settings(num_state_blocks=7)),
        ({"checkpoint_interval": 0}, Settings()),
        ({"state_host_bytes": "2KiB"}, Settings(state_host_bytes=2048)),
        ({"state_host_bytes": 9, "state_disk_dir": "a"}, Settings(state_host_bytes=9, state_disk_dir="a")),
        ({"kv_event_groups": 1}, Settings(kv_event_groups=1)),
        ({"state_bytes": 5000, "checkpoint_interval": 128}, Settings(state_bytes=5000, checkpoint_interval=128)),
    ],
)
def test_settings(given: dict[str, object], settings: Settings) -> None:
    assert Settings.of(configured(given)) == settings


def test_no_settings_at_all() -> None:
    assert Settings.of(SimpleNamespace(additional_config=None)) == Settings()
    assert Settings.of(SimpleNamespace(additional_config={"other": 1})) == Settings()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"host_cache_bytes": "200GiB"},
            "vLLM keeps the KV: give state_host_bytes in place of host_cache_bytes",
        ),
        (
            {"states": 5},
            "takes state_bytes, num_state_blocks, state_host_bytes, state_disk_dir, checkpoint_interval, kv",
        ),
        ("20GiB", "checkpoint_interval, kv_event_groups in --additional-config, and got '20GiB'"),
        ({"num_state_blocks": 0}, "num_state_blocks is 0 in --additional-config: give a positive integer"),
        ({"num_state_blocks": True}, "num_state_blocks is True in --additional-config: give a positive integer"),
        ({"num_state_blocks": "5"}, "num_state_blocks is '5' in --additional-config: give a positive integer"),
        ({"checkpoint_interval": -64}, "checkpoint_interval is -64 in --additional-config: give"),
        ({"state_bytes": "0GiB"}, "state_bytes is 0 in --additional-config: give a positive integer"),
        ({"state_bytes": "20 apples"}, "state_bytes is '20 apples' in --additional-config: give bytes, or \"20GiB\""),
        ({"state_bytes": True}, "state_bytes is True in --additional-config: give bytes"),
        ({"kv_event_groups": 3}, "kv_event_groups in --additional-config is 2 for pages and states, or 1"),
        ({"kv_event_groups": 0}, "kv_event_groups is 0 in --additional-config: give a positive integer"),
        ({"num_state_blocks": 1}, "num_state_blocks is 1: a request needs at least 2"),
        ({"checkpoint_interval": 100}, "checkpoint_interval is 100: set it to 0 or a multiple of 64"),
        ({"state_host_bytes": "many"}, "state_host_bytes is 'many' in --additional-config: give bytes, or \"20GiB\""),
        ({"state_host_bytes": 0}, "state_host_bytes is 0 in --additional-config: give a positive integer"),
        ({"state_disk_dir": "", "state_host_bytes": 9}, "state_disk_dir is '' in --additional-config: give a folder"),
        ({"state_disk_dir": 7, "state_host_bytes": 9}, "state_disk_dir is 7 in --additional-config: give a folder"),
        ({"state_disk_dir": "a"}, "state_disk_dir in --additional-config needs state_host_bytes, through which its"),
        ({"state_host_bytes": 10, "num_state_blocks": 5}, "give state_host_bytes or num_state_blocks in --additional"),
        ({"state_bytes": 10, "num_state_blocks": 5}, "give state_bytes or num_state_blocks in --additional-config, no"),
    ],
)
def test_unusable_settings_are_refused(given: object, sentence: str) -> None:
    with pytest.raises(ValueError) as raised:
        Settings.of(configured(given))
    assert sentence in str(raised.value)


def test_pool_fits_its_bytes() -> None:
    assert sizing.pool_blocks(configured({"num_state_blocks": 9}), 1000, 500, CPU) == 9
    # Beside the null ones: ten states of 1,000 with five logs of 500; 3,999 bytes hold two states with one log.
    assert sizing.pool_blocks(configured({"state_bytes": 14_000}), 1000, 500, CPU) == 10
    assert sizing.pool_blocks(configured({"state_bytes": 4_000}), 1000, 500, CPU) == 2
    # If all requests have a log, the rest is states.
    assert sizing.pool_blocks(configured({}), 1 << 20, 1 << 10, CPU) == 1022


@pytest.mark.parametrize("given", [{}, {"num_state_blocks": 9}])
@pytest.mark.parametrize("blocks", [2, 3, 9, 100, 5000])
def test_as_many_logs_as_requests_may_run(given: dict[str, Any], blocks: int) -> None:
    config = configured(given)
    most = config.scheduler_config.max_num_seqs
    assert sizing.log_slots(config, blocks) == min(most, blocks if given else blocks // 2)


@pytest.mark.parametrize("budget", [4_000, 9_999, 123_456, 10_000_000])
def test_states_and_logs_fill_the_budget(budget: int) -> None:
    config = configured({"state_bytes": budget})
    blocks = sizing.pool_blocks(config, 1000, 300, CPU)
    taken = (blocks + 1) * 1000 + (sizing.log_slots(config, blocks) + 1) * 300
    assert budget - 2300 < taken <= budget


@pytest.mark.parametrize("budget", [2_999, 500])
def test_pool_too_small(budget: int) -> None:
    with pytest.raises(
        ValueError, match=r"states of 1,000 beside the null one, with token logs of 0: raise state_bytes in"
    ):
        sizing.pool_blocks(configured({"state_bytes": budget}), 1000, 0, CPU)


def test_states_take_half_of_the_memory_that_weights_leave_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70_000, 100_000))
    assert sizing.pool_blocks(configured({}), 1000, 2000, torch.device("cuda")) == 2 * (
        (90_000 - 30_000) // 2 - 3000
    ) // (2 * 1000 + 2000)


def test_ranks_share_host_memory() -> None:
    """Slot 0 of each rank holds no state."""
    assert sizing.host_slots(configured({}), 1000) == 0
    assert sizing.host_slots(configured({"state_host_bytes": 10_000}), 1000) == 9
    assert sizing.host_slots(configured({"state_host_bytes": 10_000}, ranks=2), 1000) == 4
    assert sizing.host_slots(configured({"state_host_bytes": 10_000}, caching=False), 1000) == 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3999, r"is 3,999 in --additional-config, which must hold two states of 1,000 on each of 2 ranks: raise it"),
        ("9TiB", r"is 9,895,604,649,984 in --additional-config and the host has [0-9,]+ bytes free: lower it"),
    ],
)
def test_host_memory_of_a_wrong_size_is_refused(given: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"state_host_bytes {sentence}"):
        sizing.host_slots(configured({"state_host_bytes": given}, ranks=2), 1000)


def test_least_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(world_size=2, cpu_group="both")
    monkeypatch.setattr(vllm.distributed, "get_world_group", lambda: group)

    def all_reduce(tensor: torch.Tensor, op: Any, group: str) -> None:
        assert op == torch.distributed.ReduceOp.MIN and group == "both"
        tensor.fill_(min(int(tensor), 40))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert [sizing.least_of_all_ranks(blocks) for blocks in (30, 50)] == [30, 40]
    group.world_size = 1
    assert sizing.least_of_all_ranks(50) == 50


def test_scheduler_reads_the_number_that_the_first_rank_wrote(tmp_path: Path) -> None:
    for rank in (0, 1):
        sizing.write_sizes(configured({}, rank=rank), sizing.Sizes(100 + rank, 7, 5000))
    assert [sizing.read_sizes(configured({}, rank=rank)) for rank in (1, 0)] == [(101, 7, 5000), (100, 7, 5000)]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with pytest.raises(ValueError, match="found no number of states from its workers"):
        sizing.read_sizes(configured({}))
    assert sizing.read_sizes(configured({"num_state_blocks": 12})) == (12, 0, 0)
