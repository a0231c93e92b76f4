"""Size the state pool equally on all ranks, before vLLM sizes KV."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mambacache.runner.host_memory import available_bytes
from mambacache.vllm.private_files import folder_of, made_folder_of
from mambacache.vllm.settings import Settings

CPU_BYTES = 1 << 30
"""Default pool on a CPU."""


class Sizes(NamedTuple):
    """Holds sizes that all ranks share."""

    blocks: int
    host_slots: int = 0
    state_bytes: int = 0  # on the first rank


def pool_blocks(vllm_config: Any, block_bytes: int, log_bytes: int, device: torch.device) -> int:
    """Count the states of `block_bytes` that fit on this rank, with token logs of `log_bytes`, or raise ValueError."""
    settings = Settings.of(vllm_config)
    if settings.num_state_blocks is not None:
        return settings.num_state_blocks
    budget = settings.state_bytes
    if budget is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = int(vllm_config.cache_config.gpu_memory_utilization * total - (total - free)) // 2
    elif budget is None:
        budget = CPU_BYTES
    rest, most = budget - block_bytes - log_bytes, vllm_config.scheduler_config.max_num_seqs
    # `log_slots` gives a log for every second state, up to `most`.
    blocks = max((rest - most * log_bytes) // block_bytes, min(2 * rest // (2 * block_bytes + log_bytes), 2 * most))
    if blocks < 2:
        raise ValueError(
            f"mambacache: {budget:,} bytes hold {max(blocks, 0)} states of {block_bytes:,} beside the null one, with "
            f"token logs of {log_bytes:,}: raise state_bytes in --additional-config, or gpu_memory_utilization"
        )
    return blocks


def host_slots(vllm_config: Any, block_bytes: int) -> int:
    """Count the states of `block_bytes` that fit in this rank's share of host memory, or raise ValueError."""
    given, ranks = Settings.of(vllm_config).state_host_bytes, vllm_config.parallel_config.world_size
    if given is None or not vllm_config.cache_config.enable_prefix_caching:
        return 0
    if given > (free := available_bytes()):
        raise ValueError(
            f"mambacache: state_host_bytes is {given:,} in --additional-config and the host has {free:,} bytes free: "
            "lower it"
        )
    slots = given // ranks // block_bytes - 1  # slot 0 holds no state
    if slots < 1:
        raise ValueError(
            f"mambacache: state_host_bytes is {given:,} in --additional-config, which must hold two states of "
            f"{block_bytes:,} on each of {ranks} ranks: raise it"
        )
    return slots


def log_slots(vllm_config: Any, blocks: int) -> int:
    """Count token logs, a limit of running requests."""
    running = blocks if Settings.of(vllm_config).num_state_blocks is not None else max(blocks // 2, 1)
    return min(vllm_config.scheduler_config.max_num_seqs, running)


def least_of_all_ranks(blocks: int) -> int:
    """Return the least number of all ranks."""
    from vllm.distributed import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return blocks
    least = torch.tensor(blocks)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(least)


def write_sizes(vllm_config: Any, sizes: Sizes) -> None:
    """Tell the scheduler the sizes, or raise ValueError."""
    if Settings.of(vllm_config).num_state_blocks is not None:
        return
    try:
        made_folder_of(vllm_config.instance_id).write(_name(vllm_config), " ".join(map(str, sizes)).encode())
    except OSError as error:
        raise ValueError(
            f"mambacache: the workers cannot write the number of states ({error}): set TMPDIR to another folder, or "
            "num_state_blocks in --additional-config"
        ) from error


def read_sizes(vllm_config: Any) -> Sizes:
    """Return the sizes, from settings or a file to delete, or raise ValueError."""
    given, name = Settings.of(vllm_config).num_state_blocks, _name(vllm_config)
    if given is not None:
        return Sizes(given)
    try:
        folder = folder_of(vllm_config.instance_id)
        sizes = Sizes(*map(int, folder.read(name).split()))
        folder.delete(name)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"mambacache: the scheduler found no number of states from its workers ({error}), which may run on another "
            "machine: set num_state_blocks in --additional-config"
        ) from error
    return sizes


def _name(vllm_config: Any) -> str:
    return f"{vllm_config.parallel_config.data_parallel_index}.blocks"  # the rank is 0 for dense models
