"""Check the registration, the refused options, and the settings of the hook in vLLM's configuration."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from devices import device
from simulation import model_config
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu import attn_utils

from mambacache.kernels.device import GPUS
from mambacache.vllm import config
from mambacache.vllm.layers.pages import Pages

ARCHITECTURE = "LlamaForCausalLM"  # the simulation's; the hook asks nothing of a model


def stand_in(**changes: object) -> SimpleNamespace:
    """Return the part of a vLLM configuration that `refuse` reads; changes are `part__option=value`."""
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
        "model_config": SimpleNamespace(enable_prompt_embeds=False, dtype="torch.bfloat16", multimodal_config=None),
        "cache_config": SimpleNamespace(
            use_replayssm=False, mamba_cache_dtype="auto", kv_offloading_size=None, kv_offloading_backend="lmcache"
        ),
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


def connecting(kv_connector: str = "OffloadingConnector", kv_role: str = "kv_both") -> KVTransferConfig:
    return KVTransferConfig(kv_connector=kv_connector, kv_role=kv_role)


def test_loads_that_fail_are_computed() -> None:
    given = connecting()
    assert given.kv_load_failure_policy == "fail", "vLLM's default"
    config.refuse(stand_in(kv_transfer_config=given))
    assert given.kv_load_failure_policy == "recompute"


def test_a_connector_of_a_users_module_may_be_tried() -> None:
    config.refuse(
        stand_in(kv_transfer_config=KVTransferConfig(
            kv_connector="Own", kv_role="kv_both", kv_connector_module_path="own"
        ))
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"speculative_config": drafting(method="draft_model")}, "'draft_model' (method in --speculative-config"),
        ({"speculative_config": drafting(num_speculative_tokens=8)}, "more than 7 drafts (num_speculative_tokens)"),
        ({"speculative_config": drafting(enable_adaptive_verification=True)}, "(enable_adaptive_verification)"),
        (
            {"kv_transfer_config": connecting("NixlConnector")},
            "NixlConnector (kv_connector in --kv-transfer-config; known",
        ),
        ({"kv_transfer_config": connecting(kv_role="kv_consumer")}, "decode apart (kv_role in --kv-transfer-config)"),
        ({"cache_config__kv_offloading_size": 1.0}, "vLLM's own (--kv-offloading-backend; known are OffloadingConn"),
        ({"model_config__multimodal_config": SimpleNamespace(mm_encoder_only=True)}, "--mm-encoder-only"),
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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the calls of vLLM's own hook on an architecture."""
    calls: list[Any] = []
    model_config()  # made before, or now
    original = SimpleNamespace(verify_and_update_config=calls.append, verify_and_update_model_config=calls.append)
    monkeypatch.setitem(MODELS_CONFIG_MAP, ARCHITECTURE, type("Original", (), vars(original)))
    return calls


@pytest.fixture
def hooked(calls: list[Any]) -> list[Any]:
    """Put the plugin's hook after it."""
    config.hook(ARCHITECTURE)
    return calls


def vllm_config(*, settings: Any = None, cache: dict[str, Any] | None = None, **parts: Any) -> VllmConfig:
    model = copy.copy(model_config())
    model.config_updated = False
    limits = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=8, max_model_len=4096, is_encoder_decoder=False)
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(enable_prefix_caching=True, **cache or {}),
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
    assert vllm_config(cache={"block_size": 32}).cache_config.block_size == 32


@pytest.mark.parametrize("given", ["align", "none"])
@pytest.mark.parametrize("original", [None, MambaModelConfig], ids=["hybrid", "without attention"])
def test_the_mode_of_vllms_state_cache_is_none(given: Any, original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(config.logger, "warning", lambda text, *values: lines.append(text % values))
    model_config()
    monkeypatch.setitem(MODELS_CONFIG_MAP, ARCHITECTURE, original)
    config.hook(ARCHITECTURE, has_attention=original is None)
    settled = vllm_config(cache={"mamba_cache_mode": given})
    assert settled.cache_config.mamba_cache_mode == "none" and settled.cache_config.mamba_block_size is None
    assert [line.split(" ")[1] for line in lines] == ["--mamba-cache-mode"] * (given == "align")


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        (device("CpuPlatform"), None),
        (device("CudaPlatform", (9, 0)), None),
        (device("CudaPlatform", (7, 5)), "and this GPU has 7.5"),
        (device("CudaPlatform"), "and this GPU does not tell its own"),
        (device("RocmPlatform", (9, 4)), "and this is RocmPlatform"),  # of an MI300
        (device("RocmPlatform", (9, 5)), "and this is RocmPlatform"),
        (device("XPUPlatform"), "and this is XPUPlatform"),
    ],
)
def test_on_a_device_that_the_kernels_do_not_serve_a_model_is_vllms(
    platform: Any, why: str | None, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(config.logger, "info", lambda text, *values: lines.append(text % values))
    monkeypatch.setattr(config, "_wrong_runner", lambda config: {})
    alone = vllm_config()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: pytest.fail("a context in the front end"))
    with monkeypatch.context() as there:
        there.setattr(vllm.platforms, "current_platform", platform)
        config.hook(ARCHITECTURE)
    settled = vllm_config()
    assert config.serves(settled) == (why is None)
    if why is None:
        assert lines[-1].startswith(f"mambacache serves the recurrent states of {ARCHITECTURE}")
    else:
        assert lines[-1].startswith(f"mambacache leaves {ARCHITECTURE} to vLLM: ") and lines[-1].endswith(why)
        for part in ("scheduler_config", "parallel_config", "cache_config"):
            assert repr(getattr(settled, part)) == repr(getattr(alone, part))


@pytest.mark.parametrize("wanted", [None, "1"])
@pytest.mark.parametrize("capability", [*GPUS, (13, 0)], ids=str)
def test_a_gpu_that_only_compiled_waits_to_be_asked_for(
    capability: tuple[int, int], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm.platforms, "current_platform", device("CudaPlatform", capability))
    monkeypatch.delenv("MAMBACACHE", raising=False)
    if wanted:
        monkeypatch.setenv("MAMBACACHE", wanted)
    ran = capability in GPUS and GPUS[capability].proof in ("run", "emulated")
    reason = "its kernels never ran on a GPU of compute capability {}.{}, and MAMBACACHE=1 uses them"
    assert config.unserved_device() == (None if ran or wanted else reason.format(*capability))


@pytest.mark.parametrize("lookahead", [True, False])
def test_no_kv_block_of_a_hit_is_dropped_for_drafts(hooked: list[Any], lookahead: bool) -> None:
    """Drop none: vLLM 0.33 needs no drop while its hashes look ahead, and 0.32 would always drop."""
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


def test_one_group_of_kv_events_is_refused_without_pages(calls: list[Any]) -> None:
    config.hook(ARCHITECTURE, has_attention=False)
    with pytest.raises(ValueError, match="kv_event_groups 1 in --additional-config for a model without KV pages yet"):
        vllm_config(settings={"kv_event_groups": 1})


def test_model_runner_v2_takes_the_pages_of_a_model_without_attention(calls: list[Any]) -> None:
    """Give a request one page of a few bytes. vLLM's own functions ask for it, and have its metadata built."""
    config.hook(ARCHITECTURE, has_attention=False)
    settled = vllm_config(cache={"block_size": 32})
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


REGISTER_EACH = """
import logging, os, sys, traceback
from pathlib import Path
from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from mambacache.vllm import contract, register
logging.basicConfig(level=logging.INFO)
for number, (value, before) in enumerate({cases!r}):
    if os.fork():
        os.wait()
        continue
    with Path(sys.argv[1], str(number)).open("w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    os.environ.pop("MAMBACACHE", None)
    os.environ |= {{}} if value is None else {{"MAMBACACHE": value}}
    try:
        exec(before)
        register(); register()
        registered = ModelRegistry.models["Qwen3NextForCausalLM"].module_name
        print(registered)
        hook = MODELS_CONFIG_MAP.get("Qwen3NextForCausalLM")
        if hook is not None and registered.startswith("vllm."):
            hook.verify_and_update_config(None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)
"""
OURS, VLLMS = "mambacache.vllm.models", "vllm.model_executor.models.qwen3_next"
LEFT = "mambacache leaves Qwen3NextForCausalLM to vLLM: "
OFF = f"{LEFT}MAMBACACHE turns mambacache off"
IN_A_WORKER = "import mambacache.vllm; mambacache.vllm.parent_process = lambda: 'the front end'"
GPU = (
    "from types import SimpleNamespace; from vllm.platforms import current_platform as device;"
    "device.is_cpu, device.is_cuda = lambda: False, lambda: True;"
    "device.get_device_capability = lambda: SimpleNamespace(major={}, minor=0)"
)
TURING, HOPPER, FUTURE = GPU.format(7), GPU.format(9), GPU.format(13)
NEVER_RAN = "from mambacache.vllm import models; models.RAN_ON_A_GPU.clear()"
DIFFERS = "contract.difference = lambda: 'vLLM 0.99 changed all'"


REGISTRATIONS = [
    (None, "", OURS, ""),
    (None, IN_A_WORKER, OURS, ""),
    (None, NEVER_RAN, VLLMS, f"{LEFT}it never ran on a GPU with mambacache, and MAMBACACHE=1 serves it"),
    (None, HOPPER, OURS, ""),
    (None, FUTURE, VLLMS, f"{LEFT}its kernels never ran on a GPU of compute capability 13.0, and MAMBACACHE=1"),
    (None, DIFFERS, VLLMS, "mambacache is off: vLLM 0.99 changed all"),
    ("0", "", VLLMS, OFF),
    ("0", IN_A_WORKER, VLLMS, ""),
    ("0", DIFFERS, VLLMS, ""),
    ("1", "", OURS, ""),
    ("1", NEVER_RAN, OURS, ""),
    ("1", FUTURE, OURS, ""),
    ("1", TURING, VLLMS, f"{LEFT}its kernels are for NVIDIA GPUs of compute capability 8.0 and later"),
    ("1", DIFFERS, VLLMS, "mambacache is off: vLLM 0.99 changed all"),
    ("yes", "", VLLMS, "mambacache is off: MAMBACACHE is 'yes', set it to 1 or 0, or unset it"),
]


@pytest.fixture(scope="module")
def registered_each(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the output of each registration, in a process of its own: a registration stays."""
    folder = tmp_path_factory.mktemp("registered")
    script = REGISTER_EACH.format(cases=[case[:2] for case in REGISTRATIONS])
    subprocess.run([sys.executable, "-P", "-c", script, folder], check=True)
    return folder


@pytest.mark.parametrize("number", range(len(REGISTRATIONS)))
def test_registration(number: int, registered_each: Path) -> None:
    _, _, registered, line = REGISTRATIONS[number]
    said = (registered_each / str(number)).read_text()
    modules = [text for text in said.splitlines() if text.startswith(("mambacache.", "vllm.model"))]
    assert modules == [registered], said
    assert said.count(line) == 1 if line else "mambacache is" not in said and "mambacache leaves" not in said
