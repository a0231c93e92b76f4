"""Opting in, the options that are refused, and what the hook settles in vLLM's configuration."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulation import model_config
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu import attn_utils

from mambacache.vllm import config
from mambacache.vllm.layers.pages import Pages

ARCHITECTURE = "LlamaForCausalLM"  # of the simulation; the hook asks nothing of a model


def stand_in(**changes: object) -> SimpleNamespace:
    """As much of a vLLM configuration as `refuse` reads; changes as `part__option=value`."""
    parts: dict[str, Any] = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "use_v2_model_runner": not config.is_cpu(),
        "parallel_config": SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_dbo=False,
            worker_cls="auto",
            pipeline_parallel_size=1,
        ),
        "scheduler_config": SimpleNamespace(scheduler_cls=None, async_scheduling=None),
        "model_config": SimpleNamespace(enable_prompt_embeds=False, dtype="torch.bfloat16"),
        "cache_config": SimpleNamespace(use_replayssm=False, mamba_cache_dtype="auto"),
        "aux_output_config": SimpleNamespace(enabled=False),
    }
    for name, value in changes.items():
        part, _, option = name.partition("__")
        if option:
            setattr(parts[part], option, value)
        else:
            parts[part] = value
    return SimpleNamespace(**parts)


def drafting(**changes: object) -> SimpleNamespace:
    """Speculative decoding as it works."""
    options = {"method": "mtp", "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    return SimpleNamespace(**options | changes)


@pytest.mark.parametrize("method", config.DRAFTS)
def test_drafts_are_served(method: str) -> None:
    config.refuse(stand_in(speculative_config=drafting(method=method)))


@pytest.mark.parametrize("method", config.DRAFTS)
@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_drafts_run_ahead_on_a_gpu_without_a_pipeline(
    method: str, cpu: bool, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "is_cpu", lambda: cpu)
    ahead = stand_in(
        speculative_config=drafting(method=method),
        scheduler_config__async_scheduling=True,
        parallel_config__pipeline_parallel_size=stages,
    )
    if cpu or stages > 1:
        with pytest.raises(ValueError, match="asynchronous scheduling of drafts on a CPU or in a pipeline"):
            config.refuse(ahead)
    else:
        config.refuse(ahead)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"speculative_config": drafting(method="draft_model")}, "'draft_model' (method in --speculative-config"),
        ({"speculative_config": drafting(num_speculative_tokens=8)}, "more than 7 drafts (num_speculative_tokens)"),
        ({"speculative_config": drafting(enable_adaptive_verification=True)}, "(enable_adaptive_verification)"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"parallel_config__enable_dbo": True}, "--enable-dbo"),
        ({"parallel_config__worker_cls": "other.Worker"}, "--worker-cls"),
        ({"scheduler_config__scheduler_cls": "other.Scheduler"}, "--scheduler-cls"),
        ({"model_config__enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"cache_config__use_replayssm": True}, "--use-replayssm"),
        ({"cache_config__mamba_cache_dtype": "float32"}, "--mamba-cache-dtype"),
        ({"aux_output_config__enabled": True}, "--enable-return-routed-experts"),
        ({"use_v2_model_runner": config.is_cpu()}, "VLLM_USE_V2_MODEL_RUNNER="),
    ],
)
def test_refused_options(changes: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError) as raised:
        config.refuse(stand_in(**changes))
    sentence = str(raised.value)
    assert sentence.startswith("mambacache does not work with ") and what in sentence
    assert sentence.endswith(" yet: leave that out, or set MAMBACACHE=0")


def test_refused_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    config.refuse(stand_in())
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    config.refuse(stand_in())
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    with pytest.raises(ValueError, match="VLLM_SSM_CONV_STATE_LAYOUT"):
        config.refuse(stand_in())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What vLLM's own hook on an architecture is called with."""
    calls: list[Any] = []
    model_config()  # has been made before, or is now
    original = SimpleNamespace(verify_and_update_config=calls.append, verify_and_update_model_config=calls.append)
    monkeypatch.setitem(MODELS_CONFIG_MAP, ARCHITECTURE, type("Original", (), vars(original)))
    return calls


@pytest.fixture
def hooked(calls: list[Any]) -> list[Any]:
    """The plugin's hook after it."""
    config.hook(ARCHITECTURE)
    return calls


def vllm_config(*, block_size: int | None = None, settings: Any = None, **parts: Any) -> VllmConfig:
    model = copy.copy(model_config())
    model.config_updated = False
    given = {"block_size": block_size} if block_size else {}
    limits = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=4096, is_encoder_decoder=False)
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(enable_prefix_caching=True, **given),
        device_config=DeviceConfig("cpu"),
        additional_config={"mambacache": settings or {}},
        **{"scheduler_config": limits, **parts},
    )


def test_hook_names_scheduler_worker_and_block_size(hooked: list[Any]) -> None:
    settled = vllm_config()
    assert [id(each) for each in hooked] == [id(settled)]  # vLLM's own hook ran, once
    assert settled.scheduler_config.scheduler_cls == "mambacache.vllm.scheduler.make"
    assert settled.parallel_config.worker_cls == "mambacache.vllm.worker.StateWorker"
    assert settled.cache_config.block_size == 64
    assert vllm_config(block_size=32).cache_config.block_size == 32


@pytest.mark.parametrize("lookahead", [True, False])
def test_no_kv_block_of_a_hit_is_dropped_for_drafts(hooked: list[Any], lookahead: bool) -> None:
    """vLLM 0.33 needs to drop none while its hashes look ahead; 0.32 would always."""
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)
    looks_ahead = hasattr(drafts, "disable_lookahead_block_hashes") and lookahead
    if not lookahead and hasattr(drafts, "disable_lookahead_block_hashes"):
        drafts.disable_lookahead_block_hashes = True
    settled = vllm_config(speculative_config=drafts)
    assert settled.speculative_config.disable_eagle_block_drop == (not looks_ahead)


def test_a_model_that_is_left_to_vllm_is_named_in_the_log(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(config.logger, "info", lambda text, *values: lines.append(text % values))
    alone = vllm_config()
    config.hook_left(ARCHITECTURE, "its layer Foreign is not ours")
    settled = vllm_config()
    assert lines == [f"mambacache leaves {ARCHITECTURE} to vLLM: its layer Foreign is not ours"]
    assert [id(each) for each in calls] == [id(alone), id(settled)]
    assert not config.serves(settled)
    for part in ("scheduler_config", "parallel_config", "cache_config"):
        assert repr(getattr(settled, part)) == repr(getattr(alone, part))


def test_model_runner_v2_takes_the_pages_of_a_model_without_attention(calls: list[Any]) -> None:
    """One page a request, of a few bytes; vLLM's own functions ask for it, and have its metadata built."""
    config.hook(ARCHITECTURE, has_attention=False)
    settled = vllm_config(block_size=32)
    assert settled.cache_config.block_size == 4096 + 64 and settled.cache_config.num_gpu_blocks_override == 17
    settled.compilation_config.static_forward_context[config.PAGES] = Pages()
    ((name, spec),) = attn_utils.get_kv_cache_spec(settled).items()
    assert name == config.PAGES and spec.page_size_bytes == 16
    cache = KVCacheConfig(num_blocks=17, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([name], spec)])
    groups, graphs, sizes = attn_utils.init_attn_backend(cache, settled, torch.device("cpu"))
    assert graphs.min_cg_support == AttentionCGSupport.ALWAYS and sizes == [4096 + 64]
    starts, tables, slots = torch.tensor([0, 3, 5]), [torch.ones(2, 1)], torch.zeros(1, 5)
    for captured in (False, True):
        built = attn_utils.build_attn_metadata(
            groups, 2, 5, starts, starts, 3, torch.tensor([3, 2]), 3, tables, slots, cache,
            for_cudagraph_capture=captured,
        )  # fmt: skip
        assert built.keys() == {name}


def test_hook_refuses_at_start(hooked: list[Any]) -> None:
    with pytest.raises(ValueError, match="another worker"):
        vllm_config(parallel_config=ParallelConfig(worker_cls="other.Worker"))
    with pytest.raises(ValueError, match="num_state_blocks is 0"):
        vllm_config(settings={"num_state_blocks": 0})


REGISTER = """
import sys
from mambacache.vllm import contract, register
{before}
register(); register()
if "mambacache.vllm.models" in sys.modules:
    from vllm import ModelRegistry
    print(ModelRegistry.models["Qwen3NextForCausalLM"].module_name)
"""
DIFFERS = "contract.difference = lambda: 'vLLM 0.99 changed all'"


@pytest.mark.parametrize(
    ("value", "before", "registered", "line"),
    [
        (None, "", "", ""),
        ("0", "", "", ""),
        ("1", "", "mambacache.vllm.models", ""),
        ("1", DIFFERS, "", "mambacache is off: vLLM 0.99 changed all"),
        ("yes", "", "", "mambacache is off: MAMBACACHE is 'yes', set it to 1 or 0"),
    ],
)
def test_opt_in(value: str | None, before: str, registered: str, line: str) -> None:
    """In a process of its own: what is registered stays."""
    environment = {name: text for name, text in os.environ.items() if name != "MAMBACACHE"}
    if value is not None:
        environment["MAMBACACHE"] = value
    command = [sys.executable, "-P", "-c", REGISTER.format(before=before)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [text for text in done.stdout.splitlines() if text.startswith("mambacache.")] == [registered] * bool(
        registered
    )
    assert line in done.stdout + done.stderr
    assert bool(line) or "mambacache is off" not in done.stdout + done.stderr
