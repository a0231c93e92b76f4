"""Build the parts of an engine."""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig, EngineConfig, SamplingParams
from mambacache.engine.checkpoint import default_sampling, end_tokens, load_tokenizer
from mambacache.engine.prompts import Limits
from mambacache.engine.step_loop import StepLoop
from mambacache.kernels import StatePool
from mambacache.models.adapt import Model, load_model, model_skeleton
from mambacache.runner import sizing
from mambacache.runner.directory import HEADER, Directory
from mambacache.runner.disk_tier import DiskTier
from mambacache.runner.host_tier import HostTier
from mambacache.runner.identity import identity, weights_digest
from mambacache.runner.kv_pages import allocate_kv_pages, allocate_slabs
from mambacache.runner.model_runner import ModelRunner
from mambacache.runner.sizing import (
    Sizes,
    expected_weight_bytes,
    free_memory,
    plan_memory,
    present_device,
    total_memory,
    usable_memory,
    weight_bytes,
)
from mambacache.scheduler.drafts import DeviceDrafts, DraftFunction, on_copies, one_by_one
from mambacache.scheduler.scheduler import Scheduler
from mambacache.warm_up import warm_up_batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    sizes: Sizes
    cache: PrefixCache
    runner: ModelRunner
    step_loop: StepLoop
    limits: Limits
    tokenizer: Any
    end_tokens: frozenset[int]
    default_sampling: SamplingParams


def build(config: EngineConfig, draft: DraftFunction | None) -> Parts:
    """Load a model, and make its parts."""
    with ExitStack() as undone:
        parts = _build(config, draft, undone)
        undone.pop_all()
    return parts


def _build(config: EngineConfig, draft: DraftFunction | None, undone: ExitStack) -> Parts:
    if draft is not None and not callable(draft):
        raise ValueError(f"draft is {draft!r}: give a function of a request and a number of tokens")
    if draft is not None and not config.max_draft_tokens:
        raise ValueError("draft= is given and max_draft_tokens is 0: set it to 1 or more")
    device = present_device(config.device)
    skeleton = model_skeleton(config.model, config.dtype, device, config.revision)
    with _warnings_wait():
        weights = expected_weight_bytes(skeleton, config.model) or 0
        usable = usable_memory(config, weights, total_memory(device), free_memory(device) - weights)
        sizes = plan_memory(config, skeleton, usable)
        _check_host_memory(sizes)
        _cache_config(config, skeleton, sizes)
    if config.max_draft_tokens and draft is None and config.speculative is None:
        raise ValueError(
            f"max_draft_tokens is {config.max_draft_tokens} and nothing proposes drafts: set speculative, give draft=, "
            "or leave max_draft_tokens at 0"
        )
    if draft is not None and config.speculative is not None:
        raise ValueError(f"speculative is {config.speculative!r} and draft= is given too: leave one of them out")
    directory = _directory(config, sizes, undone)
    tokenizer = load_tokenizer(config.model, config.tokenizer, config.revision)
    del skeleton
    # Garbage collections over all modules would delay steps.
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # extensions check for leaks at exit

    model = load_model(config.model, config.dtype, device, config.revision)
    usable = usable_memory(config, weight_bytes(model), total_memory(device), free_memory(device))
    sizes = plan_memory(config, model, usable)
    _warn_of_small_steps(config, sizes)
    files = _disk_tier(config, model, torch.device(device), directory, undone)
    cache = PrefixCache(_cache_config(config, model, sizes), files)
    runner = _runner(config, model, sizes, device)
    vocab_size, kv_tokens = model.config.vocab_size, sizes.num_kv_blocks * config.block_size
    scheduler = Scheduler(
        cache,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        draft=DeviceDrafts() if config.speculative else draft and one_by_one(on_copies(draft)),
        vocab_size=vocab_size,
    )
    step_loop = StepLoop(scheduler, runner, torch.device(device), _host_tier(sizes, runner, files))
    limits = Limits(str(config.model), vocab_size, sizes.max_model_len, kv_tokens, config.max_logprobs)
    ends = frozenset(token for token in end_tokens(model.module) if token < vocab_size)
    return Parts(sizes, cache, runner, step_loop, limits, tokenizer, ends, default_sampling(model.module))


def _runner(config: EngineConfig, model: Model, sizes: Sizes, device: str) -> ModelRunner:
    runner = ModelRunner(model, *_pools(config, model, sizes, device))
    if config.speculative:
        runner.draft(sizes.max_model_len, config.max_draft_tokens, config.block_size)
    if torch.device(device).type == "cuda":
        room, width = config.max_num_batched_tokens, config.max_draft_tokens + 1
        runner.warm_up(warm_up_batches(room, sizes.max_model_len, sizes.max_num_seqs, width), config.block_size)
        if not config.enforce_eager:
            longest = sizes.max_model_len + config.max_draft_tokens
            max_pages = -(-longest // config.block_size) if model.kv_layers else 0
            runner.capture(sizes.max_num_seqs, config.max_draft_tokens, max_pages)
    return runner


def _pools(
    config: EngineConfig, model: Model, sizes: Sizes, device: str
) -> tuple[StatePool, StatePool, StatePool | None]:
    dtype, size = getattr(torch, config.state_dtype), config.block_size
    layers, logs = model.state_layers(dtype), StatePool(model.log_layers(dtype), sizes.max_num_seqs, device)
    if sizes.slab is not None:
        states, slabs = allocate_slabs(layers, model.kv_layers, sizes.num_slabs, sizes.slab, size, device)
        return states, logs, slabs
    pages = allocate_kv_pages(model.kv_layers, sizes.num_kv_blocks, size, device)
    return StatePool(layers, sizes.num_state_blocks, device), logs, pages


def _cache_config(config: EngineConfig, model: Model, sizes: Sizes) -> CacheConfig:
    return CacheConfig(
        num_state_blocks=sizes.num_state_blocks,
        num_log_slots=sizes.max_num_seqs,
        num_kv_blocks=sizes.num_kv_blocks,
        slab=(sizes.slab.states, sizes.slab.pages) if sizes.slab is not None else None,
        block_size=config.block_size,
        max_draft_tokens=config.max_draft_tokens,
        model_key="" if config.disk_cache_dir else f"{config.model} {config.revision or ''} {config.state_dtype}",
        has_attention=bool(model.kv_layers),
        max_checkpoints=sizes.max_checkpoints,
        checkpoint_interval=config.checkpoint_interval,
        strict_reuse=config.strict_reuse,
        num_host_states=sizes.num_host_states,
        num_host_pages=sizes.num_host_pages,
        state_bytes=sizes.state_bytes,
        page_bytes=sizes.kv_block_bytes,
        host_bytes_per_token=config.host_bytes_per_token,
        disk_bytes_per_token=config.disk_bytes_per_token,
    )


def _check_host_memory(sizes: Sizes) -> None:
    if sizes.host_bytes and sizes.host_bytes > (free := free_memory("cpu")):
        raise ValueError(f"host_cache_bytes takes {sizes.host_bytes:,} bytes and the host has {free:,} free: lower it")


def _directory(config: EngineConfig, sizes: Sizes, undone: ExitStack) -> Directory | None:
    """Open `disk_cache_dir`; warn if it is unusable."""
    if config.disk_cache_dir is None:
        return None
    if not sizes.num_host_states:
        logger.warning("disk_cache_dir is %r and not used: nothing is cached", str(config.disk_cache_dir))
        return None
    least = sum(HEADER.size + each for each in (sizes.state_bytes, sizes.kv_block_bytes) if each)
    if config.disk_cache_bytes is not None and config.disk_cache_bytes < least:
        raise ValueError(
            f"disk_cache_bytes is {config.disk_cache_bytes:,} and one state and one KV block take {least:,} bytes: "
            "raise disk_cache_bytes, or leave out disk_cache_dir"
        )
    try:
        directory = Directory(Path(config.disk_cache_dir))
    except OSError as error:
        logger.warning("disk_cache_dir is %r and not used: %s", str(config.disk_cache_dir), error)
        return None
    undone.callback(directory.close)
    return directory


def _disk_tier(
    config: EngineConfig, model: Model, device: torch.device, directory: Directory | None, undone: ExitStack
) -> DiskTier | None:
    if directory is None:
        return None
    try:
        files = DiskTier(directory, config.disk_cache_bytes, lambda: model_identity(model, config, device))
    except OSError as error:
        logger.warning("disk_cache_dir is %r and not used: %s", str(config.disk_cache_dir), error)
        return None
    undone.callback(files.close)  # before the directory closes: nothing may be deleted later
    return files


def model_identity(model: Model, config: EngineConfig, device: torch.device) -> str:
    """Return the identity of a model and its layouts."""
    settings = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    layout = config.block_size, model.state_layers(getattr(torch, config.state_dtype)), model.kv_layers
    return identity(weights_digest(model.module), settings, layout, ("transformers",), device)


def _host_tier(sizes: Sizes, runner: ModelRunner, files: DiskTier | None) -> HostTier | None:
    if not sizes.num_host_states:
        return None
    pools = [pool for pool in (runner.states, runner.pages) if pool is not None]
    return HostTier(pools, (sizes.num_host_states, sizes.num_host_pages)[: len(pools)], files)


def _warn_of_small_steps(config: EngineConfig, sizes: Sizes) -> None:
    aligned = sizes.max_num_seqs * (1 + config.max_draft_tokens) + config.block_size
    if config.max_num_batched_tokens < aligned:
        logger.warning(
            "max_num_batched_tokens is %d: with %d requests at a time prompts may be cut inside blocks, set it to %d "
            "or more",
            config.max_num_batched_tokens,
            sizes.max_num_seqs,
            aligned,
        )


@contextmanager
def _warnings_wait() -> Iterator[None]:
    """Suppress warnings that repeat after the weights are loaded."""
    sizing.logger.disabled = True
    try:
        yield
    finally:
        sizing.logger.disabled = False
