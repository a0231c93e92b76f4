"""Define the options of `LLM`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

from mambacache.config import EngineConfig

logger = logging.getLogger(__name__)


class EngineOptions(TypedDict, total=False):
    """List the fields of `EngineConfig` except the model."""

    tokenizer: str | Path | None
    revision: str | None
    device: str
    dtype: str
    state_dtype: str
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None
    max_logprobs: int
    long_prefill_token_threshold: int
    enable_prefix_caching: bool
    checkpoint_budget_bytes: int | str | None
    kv_cache_bytes: int | str | None
    host_cache_bytes: int | str
    host_bytes_per_token: int | str
    disk_cache_dir: str | Path | None
    disk_cache_bytes: int | str | None
    disk_bytes_per_token: int | str
    gpu_memory_utilization: float | None
    checkpoint_interval: int
    strict_reuse: bool
    speculative: str | None
    max_draft_tokens: int
    enforce_eager: bool
    seed: int | None


class VllmOptions(TypedDict, total=False):
    """List options of vLLM without effect."""

    trust_remote_code: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    swap_space: float
    cpu_offload_gb: float
    disable_log_stats: bool
    disable_custom_all_reduce: bool
    enable_chunked_prefill: bool | None
    enable_lora: bool
    quantization: str | None
    tokenizer_mode: str
    load_format: str
    kv_cache_dtype: str


class Options(EngineOptions, VllmOptions, total=False):
    """List the keyword arguments of `LLM`."""


NO_EFFECT = frozenset(VllmOptions.__annotations__)


def engine_config(model: str | Path, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration; raise TypeError for an unknown option."""
    known = [option.name for option in fields(EngineConfig)][1:]
    for name, value in options.items():
        if name in NO_EFFECT:
            logger.warning(
                "%s=%r is an option of vLLM and has no effect here: remove it, or use the vLLM plugin",
                name,
                value,
            )
        elif name not in known:
            raise TypeError(f"LLM has no option {name!r}: choose from {', '.join(known)}")
    return EngineConfig(model, **{name: value for name, value in options.items() if name in known})
