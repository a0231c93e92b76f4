"""Size a model's states and KV, and divide memory into blocks."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mambacache.config import KV_TOKENS_PER_HOST_STATE, KV_TOKENS_PER_STATE, LEAST_STATES, EngineConfig
from mambacache.kernels import state_bytes
from mambacache.kernels.device import check_gpu, check_triton
from mambacache.models.adapt import Model
from mambacache.runner.host_memory import available_bytes
from mambacache.runner.kv_pages import Slab, kv_block_bytes, slab_of
from mambacache.runner.ngram import history_bytes

logger = logging.getLogger(__name__)

SHARES = {
    "cpu": (0.25, "a CPU's memory is shared with other programs"),
    "cuda": (0.85, "the rest is for activations and CUDA graphs"),
}
"""Default share of the memory that weights leave, and the reason for the rest."""

STRETCHING = ("linear", "dynamic", "yarn")
"""Types of rotary scaling by a factor."""

MAX_DEFAULT_BLOCKS = 1 << 16

LEAST_SLABS, MOST_LOST = 8, 0.1
"""Least slabs beside running states, and largest share of a slab lost by rounding, to share memory."""

FP8_TILE = 128

SPARE_STATES = 2
"""Blocks beside running requests', so that a step's dst need not wait for its src."""


@dataclass(frozen=True)
class Sizes:
    """Holds bytes and numbers of blocks, without null blocks; limits with `slab`."""

    state_bytes: int
    log_bytes: int
    kv_block_bytes: int
    num_running_states: int
    max_checkpoints: int
    num_kv_blocks: int
    max_num_seqs: int
    max_model_len: int
    num_host_states: int = 0
    num_host_pages: int = 0
    slab: Slab | None = None

    @property
    def num_slabs(self) -> int:
        return self.num_state_blocks // self.slab.states if self.slab is not None else 0

    @property
    def device_bytes(self) -> int:
        logs = self.max_num_seqs * self.log_bytes
        if self.slab is not None:
            return logs + self.num_slabs * self.slab.nbytes
        return logs + self.num_state_blocks * self.state_bytes + self.num_kv_blocks * self.kv_block_bytes

    @property
    def num_state_blocks(self) -> int:
        return self.num_running_states + self.max_checkpoints

    @property
    def host_bytes(self) -> int:
        return self.num_host_states * self.state_bytes + self.num_host_pages * self.kv_block_bytes


def plan_memory(config: EngineConfig, model: Model, free_bytes: int) -> Sizes:
    """Divide `free_bytes` between running states, checkpoints and KV pages.

    Raises:
        ValueError: one request does not fit, the budgets exceed `free_bytes`, or max_model_len the model's limit.
    """
    state_dtype = getattr(torch, config.state_dtype)
    state, token_log = state_bytes(model.state_layers(state_dtype)), state_bytes(model.log_layers(state_dtype))
    page = kv_block_bytes(model.kv_layers, config.block_size)
    memory = int(free_bytes * _share(config.device)[0])
    max_model_len = _longest(config, model)
    if config.speculative:
        histories = history_bytes(config.max_num_seqs, max_model_len, config.max_draft_tokens)
        memory, free_bytes = memory - histories, free_bytes - histories

    least = (1 + SPARE_STATES) * state + token_log + page
    if memory < least:
        raise ValueError(
            f"one request takes {least:,} bytes of states and KV at least and {memory:,} are available for them: "
            f"{_more_memory(config)}"
        )
    # Half of the memory stays for KV and cached states.
    max_num_seqs = min(config.max_num_seqs, max((memory // 2 - SPARE_STATES * state) // (state + token_log), 1))
    if max_num_seqs < config.max_num_seqs:
        logger.warning("max_num_seqs lowered from %d to %d: more states do not fit", config.max_num_seqs, max_num_seqs)
    num_running, memory = max_num_seqs + SPARE_STATES, memory - max_num_seqs * token_log
    sizes, limits = (state, token_log, page, num_running), (max_num_seqs, max_model_len)
    if (shared := _shared(config, state, page, memory, num_running)) is not None:
        slab, max_checkpoints, num_kv_blocks = shared
        host = _host_slots(config, state, page, max_checkpoints)
        return Sizes(*sizes, max_checkpoints, num_kv_blocks, *limits, *host, slab)
    rest = memory - num_running * state
    kv_budget = config.kv_cache_bytes
    if kv_budget and not page:
        logger.warning("kv_cache_bytes is %d and not used: the model has no attention layers", kv_budget)
    if kv_budget is None:
        kv_budget = min(_kv_share(rest, state, page, max_model_len, config.block_size), MAX_DEFAULT_BLOCKS * page)
    num_kv_blocks = kv_budget // page if page else 0
    if page and not num_kv_blocks:
        raise ValueError(f"kv_cache_bytes is {kv_budget:,} and one KV block takes {page:,} bytes: raise kv_cache_bytes")
    max_checkpoints = _checkpoints(config, state, rest - num_kv_blocks * page)
    needed = max_num_seqs * token_log + (num_running + max_checkpoints) * state + num_kv_blocks * page
    if needed > free_bytes:
        raise ValueError(
            f"states and KV take {needed:,} bytes and {free_bytes:,} are free: lower kv_cache_bytes, "
            "checkpoint_budget_bytes or max_num_seqs"
        )
    host = _host_slots(config, state, page, max_checkpoints)
    return Sizes(*sizes, max_checkpoints, num_kv_blocks, *limits, *host)


def _shared(config: EngineConfig, state: int, page: int, memory: int, num_running: int) -> tuple[Slab, int, int] | None:
    """Return a slab and the limits of checkpoints and KV pages, if memory is shared."""
    budgets = config.kv_cache_bytes, config.checkpoint_budget_bytes
    if not page or not config.enable_prefix_caching or budgets != (None, None):
        return None
    slab = slab_of(state, page)
    num_slabs = min(memory // slab.nbytes - 1, 2 * MAX_DEFAULT_BLOCKS // max(slab.states, slab.pages))
    reserve = max(-(-num_running // slab.states), LEAST_STATES)  # a request's states may use two slabs
    if num_slabs < reserve + LEAST_SLABS or slab.lost(state, page) > MOST_LOST:
        return None
    return slab, num_slabs * slab.states - num_running, (num_slabs - reserve) * slab.pages


def _host_slots(config: EngineConfig, state: int, page: int, max_checkpoints: int) -> tuple[int, int]:
    budget = config.host_cache_bytes
    if budget and not max_checkpoints:
        logger.warning("host_cache_bytes is %d and not used: nothing is cached on the device", budget)
        return 0, 0
    if 0 < budget < state + page:
        raise ValueError(
            f"host_cache_bytes is {budget:,} and one state and one KV block take {state + page:,} bytes: raise "
            "host_cache_bytes, or set it to 0"
        )
    num_states = budget // (state + -(-KV_TOKENS_PER_HOST_STATE // config.block_size) * page)
    if budget and not num_states:
        num_states = 1
    return num_states, (budget - num_states * state) // page if page else 0


def _kv_share(rest: int, state: int, page: int, max_model_len: int, block_size: int) -> int:
    """Return the bytes of KV: at least the longest request, up to a half; at most 15 / 16, to cache short prompts."""
    kv = KV_TOKENS_PER_STATE * page // block_size
    longest = -(-max_model_len // block_size) * page
    return max(min(rest * kv // (kv + state), rest // 16 * 15), min(longest, rest // 2), page)


def _checkpoints(config: EngineConfig, state: int, default_bytes: int) -> int:
    if not config.enable_prefix_caching:
        return 0
    budget = config.checkpoint_budget_bytes
    if budget is None:
        if default_bytes < state:
            lower = f"lower kv_cache_bytes, which is {config.kv_cache_bytes}, or set checkpoint_budget_bytes"
            way = lower if config.kv_cache_bytes else _more_memory(config, "set checkpoint_budget_bytes")
            left = max(default_bytes, 0)
            logger.warning(
                "%d bytes are left for cached states and one takes %d: nothing is cached, %s", left, state, way
            )
        return min(max(default_bytes, 0) // state, MAX_DEFAULT_BLOCKS)
    if 0 < budget < state:
        logger.warning(
            "checkpoint_budget_bytes is %d and one state takes %d bytes: nothing is cached, raise it to cache states",
            budget,
            state,
        )
    return budget // state


def _more_memory(config: EngineConfig, *others: str) -> str:
    share = config.gpu_memory_utilization
    ways = ["free memory", "take a device with more", *others]
    if share is not None and share < 1:
        ways[1] = f"raise gpu_memory_utilization, which is {share}"
    return f"{', '.join(ways[:-1])}, or {ways[-1]}"


def weight_bytes(model: Model) -> int:
    return sum(x.numel() * x.element_size() for x in (*model.module.parameters(), *model.module.buffers()))


def expected_weight_bytes(model: Model, folder: str | Path) -> int | None:
    """Return the bytes of weights, by the files of a quantised checkpoint; None if unknown."""
    quantised = getattr(model.config, "quantization_config", None)
    if quantised is None:
        return weight_bytes(model)
    files = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    if files or quantised.get("quant_method") != "fp8":
        return files or None
    return fp8_weight_bytes(model, quantised.get("modules_to_not_convert") or ())


def fp8_weight_bytes(model: Model, left: Sequence[str] = ()) -> int:
    """Return the bytes with FP8 linears and experts, and float32 scales of tiles; output layer and `left` stay."""
    output, seen, total = model.module.get_output_embeddings(), set(), weight_bytes(model)
    for name, module in model.module.named_modules():
        if module is output or any(part in name for part in left):
            continue
        for weight in module.parameters(recurse=False):
            is_product = weight.ndim == 3 or (weight.ndim == 2 and isinstance(module, nn.Linear))
            if is_product and weight not in seen:  # layers may share a weight
                *experts, rows, columns = weight.shape
                tiles = prod(experts) * -(-rows // FP8_TILE) * -(-columns // FP8_TILE)
                total += weight.numel() * (1 - weight.element_size()) + 4 * tiles
                seen.add(weight)
    return total


def usable_memory(config: EngineConfig, weights: int, total: int, free: int) -> int:
    """Return `gpu_memory_utilization` of `total` less `weights`, at most `free`, or raise ValueError."""
    share = config.gpu_memory_utilization
    left = free if share is None else int(total * share) - weights
    if left <= 0 and share is not None:
        raise ValueError(
            f"gpu_memory_utilization is {share}, which makes {left + weights:,} bytes, and the weights take "
            f"{weights:,}: raise it"
        )
    if free <= 0:
        raise ValueError(
            f"the weights take {weights:,} bytes and {free + weights:,} are there: take a device with more memory, or "
            "a smaller dtype"
        )
    return min(left, free)


def describe(config: EngineConfig, model: Model, sizes: Sizes, weights: int, usable: int) -> str:
    block, state, page = config.block_size, sizes.state_bytes, sizes.kv_block_bytes
    share, reason = _share(config.device)
    at_most = "at most " if sizes.slab is not None else ""
    rows = [
        ("memory", f"{usable + weights:,} bytes"),
        ("weights", f"{weights:,} bytes, which leave {usable:,}"),
        ("states and KV", f"{sizes.device_bytes:,} bytes; by default at most {share:.0%} of what is left: {reason}"),
        ("one state", f"{state:,} bytes in {len(model.mixers)} recurrent layers, {config.state_dtype}"),
        (
            "one token log",
            f"{sizes.log_bytes:,} bytes, {sizes.log_bytes / state:.0%} of a state, for each running request",
        ),
        ("one KV block", f"{page:,} bytes in {len(model.kv_layers)} attention layers, {block} tokens"),
        ("one state equals", f"the KV of {state * block // page:,} tokens" if page else "(no attention layers)"),
        ("running states", f"{sizes.num_running_states} for {sizes.max_num_seqs} requests at a time"),
        ("cached states", f"{at_most}{sizes.max_checkpoints:,}, {sizes.max_checkpoints * state:,} bytes"),
        (
            "KV blocks",
            f"{at_most}{sizes.num_kv_blocks:,}, {sizes.num_kv_blocks * block:,} tokens" if page else "none",
        ),
        ("shared by both", _slabs(sizes)),
        ("host memory", _host_memory(sizes)),
        ("longest request", f"{sizes.max_model_len:,} tokens"),
    ]
    costs = [
        ("max_num_seqs + 1", f"{state + sizes.log_bytes:,} bytes: a state and its log"),
        (
            "state_dtype bfloat16",
            f"halves the recurrent part; states then round to {torch.finfo(torch.bfloat16).eps:.0e}",
        ),
    ]
    if sizes.max_checkpoints:
        rows.append(("shortest hit", f"{block} tokens, of a prompt of {block + 1} or more"))
        costs[1:1] = [
            ("a prompt", f"up to 2 cached states: its tail and its junction, {2 * state:,} bytes"),
            (f"checkpoint_interval {16 * block}", f"{state:,} bytes every {16 * block} tokens of a prompt"),
        ]
    table = "\n".join(f"{name:<28}{value}" for name, value in rows)
    return table + "\nwhat settings cost\n" + "\n".join(f"  {name:<26}{value}" for name, value in costs)


def _slabs(sizes: Sizes) -> str:
    if (slab := sizes.slab) is None:
        return "nothing: each has memory of its own"
    what = "a state" if slab.states == 1 else f"{slab.states} states"
    lost = slab.lost(sizes.state_bytes, sizes.kv_block_bytes)
    return (
        f"{sizes.num_slabs:,} slabs of {slab.nbytes:,} bytes for {what} or {slab.pages} KV blocks; rounding loses "
        f"{lost:.1%} at most"
    )


def _host_memory(sizes: Sizes) -> str:
    held = f"{sizes.num_host_states:,} states and {sizes.num_host_pages:,} KV blocks"
    return f"{held}, {sizes.host_bytes:,} bytes" if sizes.host_bytes else "none (host_cache_bytes)"


def _longest(config: EngineConfig, model: Model) -> int:
    limit = _position_limit(model.config)
    if config.max_model_len is not None and limit is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len} and {config.model} takes {limit} tokens: set it to {limit} or "
            "less, or leave it out"
        )
    return config.max_model_len or limit or 1 << 20


def _position_limit(settings: Any) -> int | None:
    """Return the model's positions, stretched by a rotary scaling."""
    limit: int | None = getattr(settings, "max_position_embeddings", None)
    rope = getattr(settings, "rope_parameters", None) or getattr(settings, "rope_scaling", None) or {}
    if limit is None or rope.get("rope_type") not in STRETCHING:
        return limit
    return max(limit, int(rope.get("original_max_position_embeddings", limit) * rope.get("factor", 1)))


def _share(device: str) -> tuple[float, str]:
    return SHARES[resolve_device(device).partition(":")[0]]


def resolve_device(device: str) -> str:
    """Return a setting's device, present or not."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device is {device!r}: set it to auto, cpu or cuda, or to one of several such as cuda:1")
    return device


def present_device(device: str) -> str:
    """Return a setting's device, or raise ValueError if it or Triton is unusable."""
    resolved = resolve_device(device)
    if resolved == "cpu":
        return resolved
    if not torch.cuda.is_available():
        raise ValueError(f"device is {device!r} and there is no CUDA device here: set it to auto or cpu")
    index, count = torch.device(resolved).index, torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device()
    if index >= count:
        raise ValueError(f"device is {device!r}, but the last of the {count} CUDA devices here is cuda:{count - 1}")
    check_gpu(index)
    check_triton()
    return resolved


def free_memory(device: str) -> int:
    """Return a device's free bytes, system caches included."""
    if present_device(device) == "cpu":
        return available_bytes()
    return torch.cuda.mem_get_info(device)[0]


def total_memory(device: str) -> int:
    if resolve_device(device) == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.get_device_properties(device).total_memory
