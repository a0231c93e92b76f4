"""The config hook: refuses what does not work, and names scheduler and worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from mambacache.kernels.indices import MAX_TOKENS_PER_DECODE
from mambacache.plan import CHUNK
from mambacache.vllm import metrics
from mambacache.vllm.log import logger
from mambacache.vllm.settings import Settings

SCHEDULER = "mambacache.vllm.scheduler.make"
WORKER = "mambacache.vllm.worker.StateWorker"
DRAFTS = "ngram", "mtp"
MAX_DRAFTS = MAX_TOKENS_PER_DECODE - 1
PAGES = "mambacache.0"
"""The layer by which a model without attention has a KV cache; vLLM looks for one number in each name."""


def refuse(config: Any) -> None:
    """Raises ValueError, with a sentence that says what to leave out, for what does not work with the plugin."""
    parallel = config.parallel_config
    for what, on in {
        **_wrong_drafts(config),
        "KV connectors (--kv-transfer-config)": config.kv_transfer_config is not None,
        "context parallelism (--decode-context-parallel-size, --prefill-context-parallel-size)": max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        )
        > 1,
        "dual batch overlap (--enable-dbo)": parallel.enable_dbo,
        "another scheduler (--scheduler-cls)": config.scheduler_config.scheduler_cls not in (None, SCHEDULER),
        "another worker (--worker-cls)": parallel.worker_cls not in ("auto", WORKER),
        "prompt embeddings (--enable-prompt-embeds)": config.model_config.enable_prompt_embeds,
        "replayed updates of Mamba2 (--use-replayssm)": config.cache_config.use_replayssm,
        "windows of another dtype than the model's (--mamba-cache-dtype)": config.cache_config.mamba_cache_dtype
        not in ("auto", str(config.model_config.dtype).removeprefix("torch.")),
        "routed experts in answers (--enable-return-routed-experts)": config.aux_output_config.enabled,
        "convolution states of layout DS (VLLM_SSM_CONV_STATE_LAYOUT)": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT")
        not in (None, "SD"),
        **_wrong_runner(config),
    }.items():
        if on:
            raise ValueError(f"mambacache does not work with {what} yet: leave that out, or set MAMBACACHE=0")


def _wrong_drafts(config: Any) -> dict[str, bool]:
    """Ways to draft (--speculative-config) that do not work: of some of them drafts are no linear guesses after a
    request's last token, or a model that drafts has states of its own."""
    drafts = config.speculative_config
    if drafts is None:
        return {}
    return {
        f"drafts by {drafts.method!r} (method in --speculative-config; known are {', '.join(DRAFTS)})": drafts.method
        not in DRAFTS,
        f"more than {MAX_DRAFTS} drafts (num_speculative_tokens)": drafts.num_speculative_tokens > MAX_DRAFTS,
        "drafts whose number the device chooses (enable_adaptive_verification)": getattr(
            drafts, "enable_adaptive_verification", False
        ),
        "asynchronous scheduling of drafts on a CPU or in a pipeline (--async-scheduling)": bool(
            config.scheduler_config.async_scheduling
        )
        and not _may_run_ahead(config),
    }


def _may_run_ahead(config: Any) -> bool:
    """Whether a step may be planned before the drafts of the one before it are verified: only model runner V2 knows on
    the device where its rows begin, and a pipeline has more than one such step under way."""
    return not is_cpu() and config.parallel_config.pipeline_parallel_size == 1


def _wrong_runner(config: Any) -> dict[str, bool]:
    """vLLM chooses V1 on a GPU for some options too, which it names in a line of its log."""
    v2 = config.use_v2_model_runner
    if is_cpu():
        return {"model runner V2 on a CPU (VLLM_USE_V2_MODEL_RUNNER=1)": v2}
    return {"model runner V1 on a GPU (VLLM_USE_V2_MODEL_RUNNER=0, or the option that vLLM's log names)": not v2}


def is_cpu() -> bool:
    """Whether this is a build of vLLM for the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def serves(config: Any) -> bool:
    """Whether a configuration is one of ours: of a model that the hook did not leave to vLLM."""
    return config.scheduler_config.scheduler_cls == SCHEDULER


def hook(architecture: str, *, has_attention: bool = True) -> None:
    """Has vLLM call us, after its own hook, when it settles the configuration of a model of this architecture."""

    def settle(vllm_config: Any) -> None:
        refuse(vllm_config)
        Settings.of(vllm_config)
        cache = vllm_config.cache_config
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

    _after_its_own(architecture, settle)


def hook_left(architecture: str, reason: str) -> None:
    """Has the log say that a model of this architecture is vLLM's, and why."""
    _after_its_own(
        architecture, lambda vllm_config: logger.info("mambacache leaves %s to vLLM: %s", architecture, reason)
    )


def _after_its_own(architecture: str, settle: Callable[[Any], None]) -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    original = MODELS_CONFIG_MAP.get(architecture)

    class StateCacheConfig(original or object):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            if original is not None:
                original.verify_and_update_config(vllm_config)
            settle(vllm_config)

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            if original is not None:
                original.verify_and_update_model_config(model_config)

    MODELS_CONFIG_MAP[architecture] = StateCacheConfig


def _one_page_a_request(config: Any) -> None:
    """For a model without attention, see `layers.pages`: so many that they bound nothing, with a watermark too."""
    cache = config.cache_config
    cache.block_size, cache.user_specified_block_size = CHUNK * (config.model_config.max_model_len // CHUNK + 1), True
    cache.mamba_cache_mode, cache.mamba_block_size = "none", None
    if cache.num_gpu_blocks_override is None:
        cache.num_gpu_blocks_override = 2 * config.scheduler_config.max_num_seqs + 1
