"""How much memory a model's states and KV take, and how many blocks of each a configuration gets."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from mambacache.config import EngineConfig
from mambacache.models.adapt import Model
from mambacache.runner.state_pool import kv_block_bytes, state_bytes

logger = logging.getLogger(__name__)

CPU_SHARE, CUDA_SHARE = 0.25, 0.85
"""Parts of the free memory that the default budgets take together."""

MAX_DEFAULT_BLOCKS = 1 << 16


@dataclass(frozen=True)
class Sizes:
    """Bytes of one block, and how many blocks of each kind there are beside the null block."""

    state_bytes: int
    kv_block_bytes: int
    num_running_states: int
    max_checkpoints: int
    num_kv_blocks: int
    max_num_seqs: int
    max_model_len: int

    @property
    def num_state_blocks(self) -> int:
        return self.num_running_states + self.max_checkpoints


def plan_memory(config: EngineConfig, model: Model, free_bytes: int) -> Sizes:
    """Divides memory between running states, checkpoints and KV pages.

    Args:
        model: with or without weights.
        free_bytes: of the device, once the weights are there.

    Raises:
        ValueError: not even one request fits.
    """
    state = state_bytes(model.state_layers(getattr(torch, config.state_dtype), config.max_draft_tokens))
    page = kv_block_bytes(model.kv_layers, config.block_size)
    memory = int(free_bytes * (CPU_SHARE if resolve_device(config.device) == "cpu" else CUDA_SHARE))
    limit = config.max_model_len or getattr(model.config, "max_position_embeddings", None) or 1 << 20
    max_model_len = min(limit, getattr(model.config, "max_position_embeddings", None) or limit)

    per_seq = 1 if not config.max_draft_tokens else config.max_draft_tokens + 3
    fitting = (memory // state - 2) // per_seq
    if fitting < 1:
        raise ValueError(
            f"one state takes {state:,} bytes and {memory:,} are available for states and KV: "
            "free memory, or lower max_draft_tokens"
        )
    max_num_seqs = min(config.max_num_seqs, fitting)
    if max_num_seqs < config.max_num_seqs:
        logger.warning("max_num_seqs lowered from %d to %d: more states do not fit", config.max_num_seqs, max_num_seqs)
    num_running = max_num_seqs * per_seq + 2
    rest = max(memory - num_running * state, 0)
    kv_budget = config.kv_cache_bytes
    if kv_budget is None:
        kv_budget = min(rest // 2, MAX_DEFAULT_BLOCKS * page)
    num_kv_blocks = kv_budget // page if page else 0
    if page and not num_kv_blocks:
        raise ValueError(f"kv_cache_bytes is {kv_budget:,} and one KV block takes {page:,} bytes: raise kv_cache_bytes")
    return Sizes(
        state, page, num_running, _checkpoints(config, state, rest - num_kv_blocks * page), num_kv_blocks, max_num_seqs,
        max_model_len,
    )  # fmt: skip


def _checkpoints(config: EngineConfig, state: int, default_bytes: int) -> int:
    if not config.enable_prefix_caching:
        return 0
    budget = config.checkpoint_budget_bytes
    if budget is None:
        return min(max(default_bytes, 0) // state, MAX_DEFAULT_BLOCKS)
    if 0 < budget < state:
        logger.warning(
            "checkpoint_budget_bytes is %d and one state takes %d bytes: nothing is cached, raise it to cache states",
            budget,
            state,
        )
    return budget // state


def weight_bytes(model: Model) -> int:
    """Bytes of all parameters and buffers."""
    return sum(x.numel() * x.element_size() for x in (*model.module.parameters(), *model.module.buffers()))


def describe(config: EngineConfig, model: Model, sizes: Sizes) -> str:
    """The sizes as a table, and what the settings that change them cost."""
    block, state, page = config.block_size, sizes.state_bytes, sizes.kv_block_bytes
    rows = [
        ("weights", f"{weight_bytes(model):,} bytes"),
        ("one state", f"{state:,} bytes in {len(model.mixers)} recurrent layers, {config.state_dtype}"),
        ("one KV block", f"{page:,} bytes in {len(model.kv_layers)} attention layers, {block} tokens"),
        ("one state equals", f"the KV of {state * block // page:,} tokens" if page else "(no attention layers)"),
        ("running states", f"{sizes.num_running_states} for {sizes.max_num_seqs} requests at a time"),
        ("cached states", f"{sizes.max_checkpoints:,}, {sizes.max_checkpoints * state:,} bytes"),
        ("KV blocks", f"{sizes.num_kv_blocks:,}, {sizes.num_kv_blocks * block:,} tokens" if page else "none"),
        ("longest request", f"{sizes.max_model_len:,} tokens"),
        ("shortest hit", f"{block} tokens, of a prompt of {block + 1} or more"),
    ]
    costs = [
        ("max_num_seqs + 1", f"{sizes.num_running_states // sizes.max_num_seqs * state:,} bytes"),
        ("a prompt", f"up to 2 cached states: its tail and its junction, {2 * state:,} bytes"),
        (f"checkpoint_interval {16 * block}", f"{state:,} bytes every {16 * block} tokens of a prompt"),
        (
            "state_dtype bfloat16",
            f"halves the recurrent part; states then round to {torch.finfo(torch.bfloat16).eps:.0e}",
        ),
    ]
    table = "\n".join(f"{name:<26}{value}" for name, value in rows)
    return table + "\nwhat settings cost\n" + "\n".join(f"  {name:<24}{value}" for name, value in costs)


def resolve_device(device: str) -> str:
    """The device that a setting means: "auto" is cuda where there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def free_memory(device: str) -> int:
    """Bytes that a device has free."""
    if resolve_device(device) == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.mem_get_info(device)[0]
