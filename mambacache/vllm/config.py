"""Check vLLM's configuration; select scheduler and worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from typing import Any

from mambacache.kernels.device import GPUS, OLDEST_GPU
from mambacache.plan import CHUNK, MAX_DRAFT_TOKENS
from mambacache.vllm import metrics
from mambacache.vllm.log import logger
from mambacache.vllm.settings import Settings

SCHEDULER = "mambacache.vllm.scheduler.make"
WORKER = "mambacache.vllm.worker.StateWorker"
DRAFTS = "ngram", "mtp"
OFFLOADING = "OffloadingConnector"
CONNECTORS = OFFLOADING, "ExampleConnector"
MEMORY_ALONE = "CPUOffloadingSpec"
"""Default `spec_name` of `OffloadingConnector`."""
LASTING_TIERS = "fs", "obj"
"""Tiers of `OffloadingConnector` that keep KV over a restart."""
PAGES = "mambacache.0"
"""Layer that gives a model without attention a KV cache; vLLM wants a number in each name."""
LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
"""Environment variable: layout of vLLM's convolution states."""

_OWN_POOL = "states are in mambacache's pool, in a layout of its own"
_OWN_BLOCKS = "hits come where mambacache has a state and --block-size a KV block"
_OWN_KERNELS = "recurrent layers run in mambacache's kernels"
_ROUNDED = "states are rounded to the nearest number, once in 16 tokens"
_NO_EFFECT: dict[str, tuple[str, str, Any, str]] = {
    "--mamba-cache-mode": ("cache_config", "mamba_cache_mode", "none", _OWN_POOL),
    "--mamba-block-size": ("cache_config", "mamba_block_size", None, _OWN_BLOCKS),
    "--prefix-match-unit": ("cache_config", "prefix_match_unit", None, _OWN_BLOCKS),
    "--prefix-cache-retention-interval": (
        "cache_config",
        "prefix_cache_retention_interval",
        0,
        "checkpoint_interval in --additional-config has a state stored every so many tokens",
    ),
    "--enable-mamba-shared-prefix-checkpoint": (
        "cache_config",
        "enable_mamba_shared_prefix_checkpoint",
        False,
        "mambacache stores a state where prompts part",
    ),
    "--mamba-backend": ("mamba_config", "backend", "triton", _OWN_KERNELS),
    "--mamba-ssu-algorithm": ("mamba_config", "ssu_algorithm", None, _OWN_KERNELS),
    "--enable-mamba-cache-stochastic-rounding": (
        "mamba_config",
        "enable_stochastic_rounding",
        False,
        _ROUNDED,
    ),
    "--mamba-cache-philox-rounds": (
        "mamba_config",
        "stochastic_rounding_philox_rounds",
        0,
        _ROUNDED,
    ),
}
"""Options for vLLM's own states: part of the configuration, field, default, and why it has no effect."""
_BACKENDS = "--gdn-prefill-backend", "--kda-prefill-backend", "--kda-decode-backend"
"""Options in vLLM's `additional_config`."""
_NO_EFFECT_OF_ENVIRONMENT = {
    "VLLM_GDN_DECODE_KERNEL": _OWN_KERNELS,
    "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE": _OWN_KERNELS,
    f"{LAYOUT}=DS": _OWN_POOL,
}


def refuse(config: Any) -> None:
    """Raise ValueError for a wrong option."""
    settle_connector(config)
    parallel = config.parallel_config
    for what, on in {
        **_wrong_drafts(config),
        "context parallelism (--decode-context-parallel-size, --prefill-context-parallel-size)": max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        )
        > 1,
        "dual batch overlap (--enable-dbo, --ubatch-size)": parallel.enable_dbo
        or getattr(parallel, "ubatch_size", 0) > 1,
        "another scheduler (--scheduler-cls)": config.scheduler_config.scheduler_cls not in (None, SCHEDULER),
        "another worker (--worker-cls)": parallel.worker_cls not in ("auto", WORKER),
        "prompt embeddings (--enable-prompt-embeds)": config.model_config.enable_prompt_embeds,
        "replayed updates of Mamba2 (--use-replayssm)": config.cache_config.use_replayssm,
        "windows of another dtype than the model's (--mamba-cache-dtype)": config.cache_config.mamba_cache_dtype
        not in ("auto", str(config.model_config.dtype).removeprefix("torch.")),
        "routed experts in answers (--enable-return-routed-experts)": config.aux_output_config.enabled,
        "results that are the same in every batch (VLLM_BATCH_INVARIANT)": os.environ.get("VLLM_BATCH_INVARIANT", "0")
        not in ("0", ""),
        "an instance that runs the encoder alone (--mm-encoder-only)": getattr(
            config.model_config.multimodal_config, "mm_encoder_only", False
        ),
        **_wrong_runner(config),
    }.items():
        if on:
            raise _refusal(what)


def settle_connector(config: Any) -> None:
    """Have failed loads computed, or raise ValueError for another connector.

    With --kv-offloading-size vLLM sets connector and role only after the hook.
    """
    transfer, known = config.kv_transfer_config, f"known are {', '.join(CONNECTORS)}"
    given = transfer.kv_connector if transfer is not None else None
    if _offloads(config):
        if config.cache_config.kv_offloading_backend != "native":
            raise _refusal(f"another connector than vLLM's own (--kv-offloading-backend; {known})")
        if os.environ.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") not in ("0", ""):
            raise _refusal(f"SimpleCPUOffloadConnector (VLLM_USE_SIMPLE_KV_OFFLOAD; {known})")
        if given not in (None, OFFLOADING):
            raise _refusal(f"{given} (--kv-transfer-config) beside {OFFLOADING} (--kv-offloading-size)")
    elif transfer is not None:
        if given not in CONNECTORS and transfer.kv_connector_module_path is None:
            raise _refusal(f"{given} (kv_connector in --kv-transfer-config; {known})")
        if transfer.kv_role != "kv_both":
            raise _refusal("prefill and decode apart (kv_role in --kv-transfer-config)")
    if transfer is not None:
        transfer.kv_load_failure_policy = "recompute"


def _offloads(config: Any) -> bool:
    return getattr(config.cache_config, "kv_offloading_size", None) is not None


def _keeps_kv(config: Any) -> bool:
    """Tell whether a connector may keep KV over a restart, as any of the user's may."""
    transfer = config.kv_transfer_config
    if transfer is None or not (_offloads(config) or transfer.kv_connector == OFFLOADING):
        return transfer is not None
    extra = transfer.kv_connector_extra_config
    tiers = extra.get("secondary_tiers") if extra.get("spec_name", MEMORY_ALONE) != MEMORY_ALONE else None
    tiers = [tier for tier in tiers if isinstance(tier, dict)] if isinstance(tiers, list) else []
    return any(tier.get("type") in LASTING_TIERS or "module_path" in tier for tier in tiers)


def _refusal(what: str) -> ValueError:
    return ValueError(f"mambacache does not work with {what} yet: leave that out, or set MAMBACACHE=0")


def _wrong_drafts(config: Any) -> dict[str, bool]:
    """Tell which unsupported ways to draft are on."""
    drafts = config.speculative_config
    if drafts is None:
        return {}
    return {
        f"drafts by {drafts.method!r} (method in --speculative-config; known are {', '.join(DRAFTS)})": drafts.method
        not in DRAFTS,
        f"more than {MAX_DRAFT_TOKENS} drafts (num_speculative_tokens)": drafts.num_speculative_tokens
        > MAX_DRAFT_TOKENS,
        "drafts whose number the device chooses (enable_adaptive_verification)": getattr(
            drafts, "enable_adaptive_verification", False
        ),
        "asynchronous scheduling of drafts on a CPU or in a pipeline (--async-scheduling)": bool(
            config.scheduler_config.async_scheduling
        )
        and not _may_run_ahead(config),
    }


def _may_run_ahead(config: Any) -> bool:
    """Tell whether a step may be planned before earlier drafts are verified: runner V2 without a pipeline."""
    return not is_cpu() and config.parallel_config.pipeline_parallel_size == 1


def _wrong_runner(config: Any) -> dict[str, bool]:
    v2 = config.use_v2_model_runner
    if is_cpu():
        return {"model runner V2 on a CPU (VLLM_USE_V2_MODEL_RUNNER=1)": v2}
    return {"model runner V1 on a GPU (VLLM_USE_V2_MODEL_RUNNER=0, or the option that vLLM's log names)": not v2}


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def unserved_device() -> str | None:
    """Return why the kernels do not serve this device, or None.

    torch.cuda would make a context, and could take ROCm for Hopper.
    """
    from vllm.platforms import current_platform

    if is_cpu():
        return None
    oldest = ".".join(map(str, OLDEST_GPU))
    served = f"its kernels are for NVIDIA GPUs of compute capability {oldest} and later, and for CPUs"
    if not current_platform.is_cuda():
        return f"{served}, and this is {type(current_platform).__name__}"
    found = current_platform.get_device_capability()
    if found is None:
        return f"{served}, and this GPU does not tell its own"
    capability, name = (found.major, found.minor), f"{found.major}.{found.minor}"
    if capability < OLDEST_GPU:
        return f"{served}, and this GPU has {name}"
    ran = capability in GPUS and GPUS[capability].proof != "compiled"
    if ran or os.environ.get("MAMBACACHE") == "1":
        return None
    return f"its kernels never ran on a GPU of compute capability {name}, and MAMBACACHE=1 uses them"


def serves(config: Any) -> bool:
    """Tell whether the hook selected our scheduler."""
    return config.scheduler_config.scheduler_cls == SCHEDULER


def hook(architecture: str, *, has_attention: bool = True) -> None:
    """Have vLLM call us to configure an architecture."""
    if (reason := unserved_device()) is not None:
        hook_left(architecture, reason)
        return

    def settle(vllm_config: Any) -> None:
        refuse(vllm_config)
        connects = vllm_config.kv_transfer_config is not None or _offloads(vllm_config)
        if connects and not has_attention:
            raise _refusal("KV connectors (--kv-transfer-config, --kv-offloading-size) for a model without KV pages")
        if Settings.of(vllm_config).kv_event_groups == 1 and (connects or not has_attention):
            what = "beside a KV connector" if connects else "for a model without KV pages"
            raise _refusal(f"kv_event_groups 1 in --additional-config {what}")
        lasting = not has_attention or _keeps_kv(vllm_config)
        if Settings.of(vllm_config).state_disk_dir is not None and not lasting:
            raise ValueError(
                "mambacache: state_disk_dir in --additional-config needs KV on disk too: give a connector that keeps "
                f"it in --kv-transfer-config (OffloadingConnector with spec_name TieringOffloadingSpec and a tier "
                f"{' or '.join(LASTING_TIERS)} in secondary_tiers, or one of your own), or leave state_disk_dir out"
            )
        cache = vllm_config.cache_config
        cache.mamba_cache_mode, cache.mamba_block_size = "none", None  # vLLM's own hooks may set both
        if not has_attention:
            _one_page_a_request(vllm_config)
        elif not cache.user_specified_block_size:
            cache.block_size, cache.user_specified_block_size = CHUNK, True
        drafts = vllm_config.speculative_config
        if drafts is not None and not _may_run_ahead(vllm_config):
            vllm_config.scheduler_config.async_scheduling = False
        if drafts is not None and getattr(drafts, "disable_lookahead_block_hashes", True):
            drafts.disable_eagle_block_drop = True  # else the KV block before a state is never hit, nor the state
        vllm_config.scheduler_config.scheduler_cls = SCHEDULER
        vllm_config.parallel_config.worker_cls = WORKER
        metrics.show(vllm_config.instance_id)
        logger.info("mambacache serves the recurrent states of %s; MAMBACACHE=0 leaves them to vLLM", architecture)

    _around_its_own(architecture, settle, before=reset_unused)


def reset_unused(config: Any) -> None:
    """Reset options for vLLM's own states."""
    unused = {}
    for option, (part, field, default, why) in _NO_EFFECT.items():
        settings = getattr(config, part)
        given = getattr(settings, field, default)
        unset = type(given)(default) if isinstance(given, Enum) else default
        if given != unset:
            setattr(settings, field, unset)
            unused[option] = why
    for option in _BACKENDS:
        if option.removeprefix("--").replace("-", "_") in (config.additional_config or {}):
            unused[option] = _OWN_KERNELS
    for setting, why in _NO_EFFECT_OF_ENVIRONMENT.items():
        name, _, value = setting.partition("=")
        if name in os.environ and value in ("", os.environ[name]):
            unused[setting] = why
    for option, why in unused.items():
        logger.warning("mambacache: %s has no effect: %s", option, why)


def hook_left(architecture: str, reason: str) -> None:
    """Log why an architecture stays vLLM's."""
    _around_its_own(
        architecture, lambda vllm_config: logger.info("mambacache leaves %s to vLLM: %s", architecture, reason)
    )


def _around_its_own(
    architecture: str, settle: Callable[[Any], None], before: Callable[[Any], None] = lambda config: None
) -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    original = MODELS_CONFIG_MAP.get(architecture)

    class StateCacheConfig(original or object):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            before(vllm_config)
            if original is not None:
                original.verify_and_update_config(vllm_config)
            settle(vllm_config)

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            if original is not None:
                original.verify_and_update_model_config(model_config)

    MODELS_CONFIG_MAP[architecture] = StateCacheConfig


def _one_page_a_request(config: Any) -> None:
    """Give each request one page, see `layers.pages`."""
    cache = config.cache_config
    cache.block_size, cache.user_specified_block_size = CHUNK * (config.model_config.max_model_len // CHUNK + 1), True
    if cache.num_gpu_blocks_override is None:
        cache.num_gpu_blocks_override = 2 * config.scheduler_config.max_num_seqs + 1
