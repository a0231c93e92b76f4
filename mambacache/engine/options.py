"""What `LLM` takes beside a model: its own options, and those of vLLM that change nothing here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypedDict

from mambacache.config import EngineConfig


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig` but the model, for type checkers."""

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


class Options(EngineOptions, total=False):
    """All that `LLM` takes: see `EngineConfig`, and `HARMLESS` and `UNUSED` for the rest."""

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


HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "trust_remote_code": (False,),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "cpu_offload_gb": (0,),
    "disable_log_stats": (True, False),
    "disable_custom_all_reduce": (True, False),
    "enable_chunked_prefill": (True,),
    "enable_lora": (False,),
    "quantization": (),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto", "safetensors"),
    "kv_cache_dtype": ("auto",),
}
"""Options of vLLM, and the values for which this engine does what they ask; None always is one."""

UNUSED = ("swap_space",)
"""Options of vLLM that may have any value: they size what this engine does not do, such as swapping."""


def engine_config(model: str | Path, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an engine.

    Raises:
        TypeError: an unknown option.
        ValueError: a value is none, or asks for what vLLM alone can do.
    """
    known = [option.name for option in fields(EngineConfig)][1:]
    for name, value in options.items():
        if name in known or name in UNUSED:
            continue
        if name not in HARMLESS:
            raise TypeError(f"LLM has no option {name!r}: choose from {', '.join(known)}")
        if value is not None and value not in HARMLESS[name]:
            takes = " or ".join(map(repr, HARMLESS[name] or [None]))
            raise ValueError(
                f"{name} is {value!r} and this engine takes {takes}: for more use the vLLM plugin, "
                "MAMBACACHE=1 vllm serve"
            )
    return EngineConfig(model, **{name: value for name, value in options.items() if name in known})
