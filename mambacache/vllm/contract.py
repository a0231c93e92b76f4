"""Check the names of vLLM that the plugin uses: `python -m mambacache.vllm.contract [FOLDER]`."""

from __future__ import annotations

import ast
import re
import sys
from importlib.util import find_spec
from pathlib import Path

SERVED = "0.32 and 0.33"

SCHEDULER = "v1/core/sched/scheduler.py"
LAYERS = "model_executor/layers/mamba"

# By file: parameters in each version, none for variables and fields.
HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    SCHEDULER: {
        "Scheduler.__init__": (
            "self vllm_config kv_cache_config structured_output_manager block_size hash_block_size mm_registry"
            " include_finished_set log_stats",
        ),
        "Scheduler.add_request": ("self request",),
        "Scheduler._handle_blocked_waiting_request": ("self request",),
        "Scheduler._get_local_prefix_cache_hit": ("self request", "self request max_cache_hit_length"),
        "Scheduler._preempt_request": ("self request timestamp drop_stale_output",),
        "Scheduler._free_request": ("self request delay_free_blocks",),
        "Scheduler.reset_prefix_cache": ("self reset_running_requests reset_connector",),
        "Scheduler._mamba_block_aligned_split": (
            "self request num_new_tokens num_new_local_computed_tokens num_external_computed_tokens",
        ),
        "Scheduler.schedule": ("self throttle_prefills",),
        "Scheduler.has_requests": ("self",),
        "Scheduler.shutdown": ("self",),
        "Scheduler.update_from_output": ("self scheduler_output model_runner_output",),
        "Scheduler.connector": ("",),
        "Scheduler.running": ("",),
        "Scheduler.prev_step_scheduled_req_ids": ("",),
        "Scheduler.enable_kv_cache_events": ("",),
        "Scheduler.kv_event_publisher": ("",),
    },
    "distributed/kv_events.py": {
        "BlockStored.session_id": ("",),
        "BlockStored.kv_cache_spec_kind": ("",),
        "BlockRemoved.group_idx": ("",),
        "KVEventBatch.events": ("",),
        "EventPublisher.publish": ("self events",),
    },
    "v1/request.py": {
        "Request.all_token_ids": ("",),
        "Request.num_computed_tokens": ("",),
        "Request.block_hashes": ("",),
        "Request.is_finished": ("self",),
    },
    "v1/core/block_pool.py": {
        "BlockPool.hash_block_size": ("",),
        "BlockPool.kv_event_queue": ("",),
        "BlockPool.medium": ("",),
        "BlockPool.blocks": ("",),
        "BlockPool.free_block_queue": ("",),
        "BlockPool.get_cached_block": ("self block_hash kv_cache_group_ids",),
        "BlockPool._emit_block_removed_events": ("self block_hashes",),
        "BlockPool._insert_block_hash": ("self block_hash_with_group_id block num_tokens",),
    },
    "v1/core/kv_cache_utils.py": {
        "get_block_hash": ("key",),
        "KVCacheBlock.block_id": ("",),
        "KVCacheBlock.block_hash": ("self",),
        "FreeKVCacheBlockQueue.num_free_blocks": ("",),
        "FreeKVCacheBlockQueue.popleft": ("self",),
        "FreeKVCacheBlockQueue.popleft_n": ("self n",),
        "FreeKVCacheBlockQueue.remove": ("self block",),
        "FreeKVCacheBlockQueue.append": ("self block",),
        "FreeKVCacheBlockQueue.append_n": ("self blocks",),
        "FreeKVCacheBlockQueue.prepend_n": ("self blocks",),
        "FreeKVCacheBlockQueue.get_all_free_blocks": ("self",),
        "get_request_block_hasher": (
            "hash_block_size caching_hash_fn",
            "hash_block_size caching_hash_fn num_hash_lookahead_tokens",
        ),
        "maybe_convert_block_hash": ("hash_bytes",),
        "to_event_extra_keys": ("extra_keys",),
        "generate_block_hash_extra_keys": ("request start_token_idx end_token_idx start_mm_idx",),
    },
    "v1/core/kv_cache_manager.py": {
        "KVCacheManager.block_pool": ("",),
        "KVCacheManager.kv_cache_event_metadata": ("",),
        "KVCacheManager.take_events": ("self",),
        "KVCacheManager.allocate_slots": (
            "self request num_new_tokens num_new_computed_tokens new_computed_blocks num_lookahead_tokens"
            " num_external_computed_tokens delay_cache_blocks num_encoder_tokens full_sequence_must_fit reserved_blocks"
            " has_scheduled_reqs skip_zeroing_group_ids",
        ),
        "KVCacheManager.get_computed_blocks": ("self request", "self request max_cache_hit_length"),
        "KVCacheManager.truncate_computed_blocks": ("self blocks num_computed_tokens",),
        "KVCacheManager.get_block_ids": ("self request_id",),
        "KVCacheManager.evict_blocks": ("self block_ids",),
        "KVCacheManager.free": ("self request",),
    },
    "v1/core/kv_cache_coordinator.py": {
        "KVCacheCoordinator.emit_cached_block_events": ("self request computed_blocks",)
    },
    "model_executor/custom_op.py": {
        "op_registry_oot": ("",),
        "PluggableLayer.register_oot": ("cls _decorated_layer_cls name",),
    },
    "model_executor/layers/attention_layer_base.py": {
        "AttentionLayerBase.get_attn_backend": ("self",),
        "AttentionLayerBase.get_kv_cache_spec": ("self vllm_config",),
    },
    "v1/attention/backend.py": {
        "AttentionBackend.get_builder_cls": ("",),
        "AttentionMetadataBuilder.__init__": ("self kv_cache_spec layer_names vllm_config device",),
        "AttentionMetadataBuilder.build": ("self common_prefix_len common_attn_metadata fast_build",),
    },
    "v1/kv_cache_interface.py": {"KVCacheSpec.block_size": ("",), "AttentionSpec.tokens_per_state": ("",)},
    "model_executor/models/registry.py": {
        "_ModelRegistry.models": ("",),
        "_ModelRegistry.register_model": ("self model_arch model_cls",),
    },
    "distributed/kv_transfer/kv_connector/v1/base.py": {
        "KVConnectorBase_V1.get_num_new_matched_tokens": ("self request num_computed_tokens",),
    },
    "config/kv_transfer.py": {
        "KVTransferConfig.kv_role": ("",),
        "KVTransferConfig.kv_load_failure_policy": ("",),
        "KVTransferConfig.kv_connector_module_path": ("",),
    },
    "config/cache.py": {"CacheConfig.kv_offloading_size": ("",), "CacheConfig.kv_offloading_backend": ("",)},
    "config/kernel.py": {"KernelConfig.enable_jit_warmup": ("",)},
    "config/speculative.py": {"SpeculativeConfig.disable_eagle_block_drop": ("",)},
    "v1/outputs.py": {
        "ModelRunnerOutput.num_nans_in_logits": ("",),
        "ModelRunnerOutput.kv_connector_output": ("",),
        "KVConnectorOutput.invalid_block_ids": ("",),
        "AsyncModelRunnerOutput.get_output": ("self",),
    },
    "v1/worker/gpu_worker.py": {
        "Worker.load_model": ("self * load_dummy_weights",),
        "Worker.compile_or_warm_up_model": ("self",),
        "Worker.execute_model": ("self scheduler_output",),
        "Worker.sample_tokens": ("self grammar_output",),
    },
    "v1/worker/gpu/model_runner.py": {
        "GPUModelRunner._dummy_run": (
            "self num_tokens *args skip_attn uniform_decode context_len skip_eplb is_profile valid_dummy_state_slots"
            " randomize_inputs **kwargs",
        ),
    },
    "v1/worker/gpu/model_states/default.py": {
        "DefaultModelState.prepare_attn": (
            "self input_batch cudagraph_mode block_tables slot_mappings attn_groups kv_cache_config for_capture"
            " ubatch_idx model_specific_attn_metadata",
        ),
    },
    "v1/worker/gpu/model_states/interface.py": {"ModelState.get_additional_cg_support": ("self",)},
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner._prepare_inputs": ("self scheduler_output num_scheduled_tokens",),
        "GPUModelRunner.calculate_reorder_batch_threshold": ("self",),
    },
    f"{LAYERS}/abstract.py": {
        "MambaBase.get_kv_cache_spec": ("self vllm_config",),
        "MambaBase.get_state_shape": ("self",),
        "MambaBase.get_state_dtype": ("self",),
    },
    f"{LAYERS}/gdn/qwen_gdn_linear_attn.py": {
        "QwenGatedDeltaNetAttention._forward_core": ("self mixed_qkv b a core_attn_out",)
    },
    f"{LAYERS}/gdn/olmo_gdn_linear_attn.py": {
        "OlmoHybridGatedDeltaNetAttention._forward_core": ("self mixed_qkv b a core_attn_out",)
    },
    f"{LAYERS}/gdn/kimi_gdn_linear_attn.py": {
        "KimiGatedDeltaNetAttention._forward": ("self mixed_qkv g1 g2 beta core_attn_out",)
    },
    f"{LAYERS}/mamba_mixer2.py": {"MambaMixer2.conv_ssm_forward": ("self projected_states output",)},
    f"{LAYERS}/mamba_mixer.py": {"MambaMixer.forward_impl": ("self hidden_states output",)},
    f"{LAYERS}/short_conv.py": {"ShortConv.forward_cuda": ("self hidden_states output",)},
}


def difference(folder: Path | None = None) -> str | None:
    """Return a sentence about the first difference, if any.

    Args:
        folder: the package `vllm`; None for the installed package.
    """
    if folder is None:
        spec = find_spec("vllm")
        if spec is None or spec.origin is None:
            return f"vLLM is not installed: it serves vLLM {SERVED}"
        folder = Path(spec.origin).parent
    for file, hooks in HOOKS.items():
        path = folder / file
        found = _signatures(path) if path.exists() else {}
        for name, known in hooks.items():
            if found.get(name) not in known:
                module = ".".join(["vllm", *Path(file).with_suffix("").parts])
                what = "has no" if name not in found else "changed"
                return f"vLLM{_version(folder)} {what} {module}.{name}; it serves vLLM {SERVED}"
    return None


def _signatures(path: Path) -> dict[str, str]:
    """Return parameters by name, "" for variables and fields."""
    found = {}
    top = ast.parse(path.read_text()).body
    for prefix, body in [("", top), *((f"{each.name}.", each.body) for each in top if isinstance(each, ast.ClassDef))]:
        for node in body:
            if isinstance(node, ast.AnnAssign):
                found[f"{prefix}{ast.unparse(node.target)}"] = ""
            elif isinstance(node, ast.FunctionDef):
                found[f"{prefix}{node.name}"] = _parameters(node.args)
                if node.name == "__init__":
                    found |= dict.fromkeys((prefix + name for name in _fields(node)), "")
    return found


def _fields(init: ast.FunctionDef) -> list[str]:
    assigned = [each for node in ast.walk(init) if isinstance(node, ast.Assign) for each in node.targets]
    assigned += [node.target for node in ast.walk(init) if isinstance(node, ast.AnnAssign)]
    return [each.attr for each in assigned if isinstance(each, ast.Attribute)]


def _parameters(args: ast.arguments) -> str:
    names = [each.arg for each in (*args.posonlyargs, *args.args)]
    if args.vararg or args.kwonlyargs:
        names += ["*" + (args.vararg.arg if args.vararg else ""), *(each.arg for each in args.kwonlyargs)]
    return " ".join([*names, *(["**" + args.kwarg.arg] if args.kwarg else [])])


def _version(folder: Path) -> str:
    path = folder / "_version.py"
    match = re.search(r"""\b__version__ = version = ['"]([^'"]+)""", path.read_text()) if path.exists() else None
    return f" {match[1]}" if match else ""


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    found = difference(folder)
    print(found or f"mambacache knows all that it needs of this vLLM ({sum(map(len, HOOKS.values()))} hooks)")
    sys.exit(found is not None)


if __name__ == "__main__":
    main()
