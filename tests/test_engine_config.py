"""Check that parameters and options of other engines are taken, and that wrong values are refused at once."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mambacache import CacheConfig, EngineConfig, SamplingParams
from mambacache.config import LARGEST_TOP_K, NO_LIMIT
from mambacache.runner.sampler import draw_parameters


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"stop": "word"}, {"stop": ("word",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": ["a" * 1024] * 64}, {"stop": ("a" * 1024,) * 64}),
        ({"stop": None, "stop_token_ids": None, "checkpoint_at": None}, {"stop": (), "stop_token_ids": ()}),
        ({"stop_token_ids": {7}, "checkpoint_at": range(2)}, {"stop_token_ids": (7,), "checkpoint_at": (0, 1)}),
        ({"stop_token_ids": np.array([3, 4])}, {"stop_token_ids": (3, 4)}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": None, "top_p": None, "min_p": None}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        ({"top_k": 10**12}, {"top_k": LARGEST_TOP_K}),
        ({"temperature": None, "n": None, "ignore_eos": None}, {"temperature": 1.0, "n": 1, "ignore_eos": False}),
        ({"temperature": 0, "top_p": 1}, {"temperature": 0.0, "top_p": 1.0}),
        ({"temperature": np.float32(0.5), "max_tokens": np.int64(3)}, {"temperature": 0.5, "max_tokens": 3}),
        ({"max_tokens": None}, {"max_tokens": NO_LIMIT}),
        ({"logprobs": None, "prompt_logprobs": np.int8(2)}, {"logprobs": None, "prompt_logprobs": 2}),
        ({"seed": -(10**30)}, {"seed": -(10**30)}),
        ({"repetition_penalty": 2, "presence_penalty": None}, {"repetition_penalty": 2.0, "presence_penalty": 0.0}),
        ({"frequency_penalty": np.float32(-2), "min_tokens": 16}, {"frequency_penalty": -2.0, "min_tokens": 16}),
        ({"logit_bias": {np.int64(3): 1, "4": np.float32(-0.5)}}, {"logit_bias": {3: 1.0, 4: -0.5}}),
        ({"logit_bias": None, "skip_special_tokens": None}, {"logit_bias": None, "skip_special_tokens": True}),
    ],
)  # fmt: skip
def test_parameters_that_are_taken(options: dict[str, Any], kept: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for name, value in kept.items():
        assert getattr(params, name) == value and type(getattr(params, name)) is type(value)
    assert hash(params) == hash(SamplingParams(**options))
    draw_parameters([params], [params.seed or 0], [0])


WRONG_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "a"}, "temperature is 'a': set it to a number"),
    ({"temperature": float("nan")}, "temperature is nan: set it to 0"),
    ({"temperature": float("inf")}, "temperature is inf: set it to 0"),
    ({"temperature": True}, "temperature is True: set it to a number"),
    ({"temperature": 10**400}, "temperature is beyond the largest float: set it nearer to 0"),
    ({"temperature": -(10**400)}, "temperature is beyond the largest float: set it nearer to 0"),
    ({"logit_bias": {3: -(10**400)}}, "a value of logit_bias is beyond the largest float"),
    ({"top_k": 1.0}, "top_k is 1.0: set it to an integer"),
    ({"top_k": True}, "top_k is True: set it to an integer"),
    ({"top_p": "1"}, "top_p is '1': set it to a number"),
    ({"top_p": float("nan")}, "top_p is nan: set it above 0"),
    ({"min_p": float("nan")}, "min_p is nan: set it between"),
    ({"seed": 1.0}, "seed is 1.0: set it to an integer"),
    ({"max_tokens": 1.5}, "max_tokens is 1.5: set it to an integer"),
    ({"max_tokens": "5"}, "max_tokens is '5': set it to an integer"),
    ({"max_tokens": True}, "max_tokens is True: set it to an integer"),
    ({"logprobs": True}, "logprobs is True: set it to an integer"),
    ({"prompt_logprobs": 1.0}, "prompt_logprobs is 1.0: set it to an integer"),
    ({"n": 2.0}, "n is 2.0: set it to an integer"),
    ({"stop": [1]}, "an item of stop is 1: set it to a string"),
    ({"stop": 5}, "stop is 5: set it to a list"),
    ({"stop": b"end"}, "stop is b'end': set it to a list"),
    ({"stop": {"end": 1}}, "stop is {'end': 1}: set it to a list"),
    ({"stop_token_ids": np.array(12)}, "stop_token_ids is array(12): set it to a list"),
    ({"stop": ""}, "stop holds an empty string: remove it"),
    ({"stop": ["a"] * 65}, "stop holds 65 strings: set it to 64 or fewer"),
    ({"stop": "a" * 1025}, "stop holds a string of 1,025 characters: shorten it to 1,024 or fewer"),
    ({"stop_token_ids": [1.0]}, "an item of stop_token_ids is 1.0: set it to an integer"),
    ({"stop_token_ids": [False]}, "an item of stop_token_ids is False: set it to an integer"),
    ({"stop_token_ids": "12"}, "stop_token_ids is '12': set it to a list"),
    ({"stop_token_ids": 12}, "stop_token_ids is 12: set it to a list"),
    ({"checkpoint_at": [64.0]}, "an item of checkpoint_at is 64.0: set it to an integer"),
    ({"checkpoint_at": 64}, "checkpoint_at is 64: set it to a list"),
    ({"salt": 5}, "salt is 5: set it to a string"),
    ({"salt": b"tenant"}, "salt is b'tenant': set it to a string"),
    ({"ignore_eos": 1}, "ignore_eos is 1: set it to True or False"),
    ({"read_cache": "no"}, "read_cache is 'no': set it to True or False"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0: set it above 0, or to 1 for none"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty is inf: set it above 0"),
    ({"presence_penalty": 2.5}, "presence_penalty is 2.5: set it between -2 and 2"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty is nan: set it between -2 and 2"),
    ({"logit_bias": [3]}, "logit_bias is [3]: set it to a dictionary"),
    ({"logit_bias": {"a": 1}}, "a key of logit_bias is 'a': set it to an integer"),
    ({"logit_bias": {3: "a"}}, "a value of logit_bias is 'a': set it to a number"),
    (
        {"logit_bias": {3: 101}},
        "logit_bias holds (3, 101.0): give token ids from 0 on, and numbers between -100 and 100",
    ),
    ({"logit_bias": {-1: 1}}, "logit_bias holds (-1, 1.0): give token ids from 0 on"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias holds (3, nan): give token ids"),
    ({"min_tokens": -1}, "min_tokens is -1: set it between 0 and max_tokens, which is 16"),
    ({"min_tokens": 17}, "min_tokens is 17: set it between 0 and max_tokens, which is 16"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output is 'yes': set it to True or False"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_PARAMETERS)
def test_parameters_of_a_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [("half", "float16"), ("float", "float32"), ("float16", "float16"), (torch.bfloat16, "bfloat16"),
     (torch.half, "float16"), ("torch.float32", "float32")],
)  # fmt: skip
def test_names_of_dtypes(given: Any, name: str) -> None:
    config = EngineConfig("model", dtype=given, state_dtype=given)
    assert (config.dtype, config.state_dtype) == (name, name)


def test_options_that_are_taken() -> None:
    config = EngineConfig(Path("model"), dtype=None, max_num_seqs=np.int32(5), max_model_len=None, seed=None)
    assert (config.dtype, config.max_num_seqs, config.max_model_len) == ("auto", 5, None)
    assert type(config.max_num_seqs) is int


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_devices_of_torch(device: str) -> None:
    assert EngineConfig("model", device=torch.device(device)) == EngineConfig("model", device=device)  # type: ignore[arg-type]


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model is None: set it to a string or a path"),
    ({"model": 5}, "model is 5: set it to a string or a path"),
    ({"model": ""}, "model is an empty string: set it to a directory"),
    ({"tokenizer": ""}, "tokenizer is an empty string: set it to a directory, or leave it out"),
    ({"speculative": ""}, "speculative is '': set it to \"ngram\", or leave it out and give LLM's draft="),
    ({"disk_cache_dir": "", "host_cache_bytes": 9}, "disk_cache_dir is an empty string: set it to a directory, or"),
    ({"device": 0}, "device is 0: set it to a string"),
    ({"dtype": 16}, "dtype is '16': choose auto, float32"),
    ({"dtype": torch.int8}, "dtype is 'int8': choose auto, float32"),
    ({"block_size": 64.0}, "block_size is 64.0: set it to an integer"),
    ({"max_num_seqs": "8"}, "max_num_seqs is '8': set it to an integer"),
    ({"max_num_seqs": True}, "max_num_seqs is True: set it to an integer"),
    ({"max_num_batched_tokens": 1e3}, "max_num_batched_tokens is 1000.0: set it to an integer"),
    ({"kv_cache_bytes": "plenty"}, "kv_cache_bytes is 'plenty': set it to bytes, or to a size such as \"20GiB\""),
    ({"kv_cache_bytes": "-1GB"}, "kv_cache_bytes is '-1GB': set it to bytes, or to a size such as"),
    ({"checkpoint_budget_bytes": 1e9}, "checkpoint_budget_bytes is 1000000000.0: set it to bytes, or to a size such"),
    ({"host_cache_bytes": True}, "host_cache_bytes is True: set it to bytes, or to a size such"),
    ({"max_logprobs": -2}, "max_logprobs is -2: set it to 0 or more, or to -1 for no limit"),
    ({"enable_prefix_caching": 0}, "enable_prefix_caching is 0: set it to True or False"),
    ({"strict_reuse": "yes"}, "strict_reuse is 'yes': set it to True or False"),
    ({"seed": 0.5}, "seed is 0.5: set it to an integer"),
    ({"tokenizer": 5}, "tokenizer is 5: set it to a string or a path"),
    ({"revision": 1}, "revision is 1: set it to a string"),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0.0: set it above 0 and at most 1, or to None"),
    ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization is '0.9': set it to a number"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_options_of_a_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        EngineConfig(**{"model": "model", **options})
    assert message in str(error.value) and "\n" not in str(error.value)


BYTES = [
    (config, option.name)
    for config in (EngineConfig, CacheConfig)
    for option in fields(config)
    if "bytes" in option.name
]


@pytest.mark.parametrize(("config", "name"), BYTES, ids=[f"{config.__name__}-{name}" for config, name in BYTES])
def test_sizes_are_taken_as_text(config: type, name: str, tmp_path: Path) -> None:
    """Wherever a number of bytes is."""
    of_engine: dict[str, Any] = {"model": "m", "host_cache_bytes": 1, "disk_cache_dir": tmp_path}
    needed = of_engine if config is EngineConfig else {"num_state_blocks": 2}
    for given, count in (("50MB", 50_000_000), ("1.5 KiB", 1536), ("7", 7), (np.int64(9), 9)):
        value = getattr(config(**needed | {name: given}), name)
        assert value == count and type(value) is int
