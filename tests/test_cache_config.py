"""Check that a setting that cannot work is refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from mambacache.config import CacheConfig, EngineConfig, SamplingParams

OF_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 0}, "block_size is 0: set it to a positive multiple of 64"),
    ({"block_size": -64}, "block_size is -64: set it to a positive multiple of 64"),
    ({"block_size": 96}, "block_size is 96: set it to a positive multiple of 64"),
    ({"max_draft_tokens": 8}, "max_draft_tokens is 8: set it between 0 and 7"),
    ({"max_draft_tokens": -1}, "max_draft_tokens is -1: set it between 0 and 7"),
    ({"checkpoint_interval": 32}, "checkpoint_interval is 32: set it to 0 or a multiple of 64"),
    ({"checkpoint_interval": -64}, "checkpoint_interval is -64: set it to 0 or a multiple of 64"),
    ({"checkpoint_interval": 64, "block_size": 128}, "checkpoint_interval is 64: set it to 0 or a multiple of 128"),
]
"""What a cache refuses, and an engine before it reads a model."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *OF_BOTH,
        ({"num_state_blocks": "8"}, "num_state_blocks is '8': set it to an integer"),
        ({"num_state_blocks": 20.0}, "num_state_blocks is 20.0: set it to an integer"),
        ({"has_attention": 1}, "has_attention is 1: set it to True or False"),
        ({"slab": 5}, "slab is 5: set it to 2 items"),
        ({"slab": (1, 2, 3)}, "slab is \\(1, 2, 3\\): set it to 2 items"),
        ({"slab": (1, "2")}, "an item of slab is '2': set it to an integer"),
        ({"num_state_blocks": 1}, "num_state_blocks is 1: a request needs at least 2"),
        ({"num_log_slots": 0}, "num_log_slots is 0: set it to 1 or more, or to None"),
        ({"num_kv_blocks": -1}, "num_kv_blocks is -1: set it to 0 or more"),
        ({"num_kv_blocks": 1, "has_attention": False}, "num_kv_blocks must be 0 for a model without attention"),
        ({"max_checkpoints": -1}, "max_checkpoints is -1: set it to 0 or more, or to None"),
        ({"max_seen_blocks": -1}, "max_seen_blocks and record_tokens must be 0 or more"),
        ({"record_tokens": -1}, "max_seen_blocks and record_tokens must be 0 or more"),
    ],
)
def test_cache_config_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheConfig(**{"num_state_blocks": 20, **options})


@pytest.mark.parametrize("drafts", [0, 1, 7])
def test_cache_config_takes_the_least_that_works(drafts: int) -> None:
    CacheConfig(num_state_blocks=2, num_log_slots=1, max_draft_tokens=drafts, max_checkpoints=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1.0: set it to 0"),
        ({"top_k": -2}, "top_k is -2: set it to 1 or more, or to 0 or -1 for all"),
        ({"top_p": 0}, "top_p is 0.0: set it above 0"),
        ({"top_p": 1.5}, "top_p is 1.5: set it above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p is -0.1: set it between 0 and 1"),
        ({"min_p": 1.1}, "min_p is 1.1: set it between 0 and 1"),
        ({"max_tokens": 0}, "max_tokens is 0: set it to 1 or more"),
        ({"n": 0}, "n is 0: set it between 1 and 16,384"),
        ({"logprobs": -1}, "logprobs is -1: set it to 0 or more, or to None"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1: set it to 0 or more, or to None"),
        ({"stop": ["word", ""]}, "stop holds an empty string: remove it"),
        ({"checkpoint_at": [64, -1]}, "checkpoint_at holds a negative position: remove it"),
    ],
)
def test_sampling_params_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *OF_BOTH,
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0: set it to 1 or more"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: set it to 1 or more"),
        ({"max_model_len": 0}, "max_model_len is 0: set it to 1 or more, or to None"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1: set it to 0"),
        ({"checkpoint_budget_bytes": -1}, "checkpoint_budget_bytes is -1: set it to 0 or more, or to None"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes is -1: set it to 0 or more, or to None"),
        ({"state_dtype": "float64"}, "state_dtype is 'float64': choose float32, bfloat16, float16"),
        ({"dtype": "int8"}, "dtype is 'int8': choose auto, float32, bfloat16, float16"),
    ],
)
def test_engine_config_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig("model", **options)
