"""Run `mambacache plan`."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mambacache.cli.options import given_fields
from mambacache.config import EngineConfig

if TYPE_CHECKING:
    from mambacache.models.adapt import Model

GPU_MEMORY_UTILIZATION = 0.92
MANY_SEQS, FEW_SEQS, LARGE_GPU = 1024, 256, 70 << 30
"""vLLM's defaults, with requests on large and other GPUs."""


def run(args: argparse.Namespace) -> int:
    """Print the sizes that an engine or the plugin would choose."""
    plugin = args.tensor_parallel_size is not None or args.state_bytes is not None or args.quantization is not None
    given = given_fields(args, EngineConfig)
    if (args.memory is not None or plugin) and given.get("device", "auto") == "auto":
        given["device"] = "cuda"
    if (args.memory is not None or plugin) and given["device"] != "cpu":
        given.setdefault("dtype", "bfloat16")
    config = EngineConfig(args.model, **given)
    if plugin:
        _plan_plugin(args, config)
    else:
        _plan_engine(args, config)
    return 0


def _plan_engine(args: argparse.Namespace, config: EngineConfig) -> None:
    from mambacache.runner import sizing

    device = sizing.resolve_device(config.device)
    model, weights, note = _load(config, device)
    kind = "CPU" if device == "cpu" else "GPU"
    place = f"this machine's {kind}" if args.memory is None else f"a {kind} with {args.memory:,} bytes"
    lines = [f"{'planned for':<28}{place}, weights in {_dtype(model)} (--device, --memory and --dtype change that)"]
    if note:
        lines.append(note)
    free = sizing.free_memory(device) if args.memory is None else args.memory
    total = sizing.total_memory(device) if args.memory is None else free
    usable = sizing.usable_memory(config, weights, total, free - weights)
    lines.append(sizing.describe(config, model, sizing.plan_memory(config, model, usable), weights, usable))
    print("\n".join(lines))


def _plan_plugin(args: argparse.Namespace, config: EngineConfig) -> None:
    """Print the plugin's sizes on each GPU."""
    from mambacache.runner import sizing
    from mambacache.runner.shards import shard_sizes
    from mambacache.vllm.sizing import log_slots, pool_blocks

    ranks = 1 if args.tensor_parallel_size is None else args.tensor_parallel_size
    if ranks < 1:
        raise ValueError(f"tensor_parallel_size is {ranks}: set it to 1 or more")
    if config.device == "cpu":
        raise ValueError("the plugin is planned for GPUs: leave out --device, and give --memory where there is none")
    total = sizing.total_memory(sizing.present_device(config.device)) if args.memory is None else args.memory
    model, weights, note = _load(config, config.device)
    if args.quantization is not None:
        weights, note = sizing.fp8_weight_bytes(model), None
    share = config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    weights //= ranks
    left = int(share * total) - weights
    budget = args.state_bytes if args.state_bytes is not None else max(left, 0) // 2
    if left < budget or not budget:
        raise ValueError(
            f"on each GPU the weights take {weights:,} of {int(share * total):,} bytes and the states {budget:,}: "
            "take larger GPUs or more of them, or lower state_bytes"
        )
    sizes = shard_sizes(config, model, ranks)
    most = MANY_SEQS if total >= LARGE_GPU else FEW_SEQS
    if "max_num_seqs" in given_fields(args, EngineConfig):
        most = config.max_num_seqs
    asked: Any = SimpleNamespace(
        additional_config={"mambacache": {"state_bytes": budget}}, scheduler_config=SimpleNamespace(max_num_seqs=most)
    )
    states = pool_blocks(asked, sizes.state, sizes.log, model.module.device)
    running = log_slots(asked, states)
    rest = left - (states + 1) * sizes.state - (running + 1) * sizes.log
    block, blocks = config.block_size, rest // sizes.page if sizes.page else 0
    gpus = "a GPU" if ranks == 1 else f"{ranks} GPUs"
    weights_in = "fp8" if args.quantization else _dtype(model)
    rows = [
        ("planned for", f"vLLM with the plugin on {gpus} with {total:,} bytes each, weights in {weights_in}"),
        ("memory", f"{int(share * total):,} bytes of each GPU: gpu_memory_utilization {share}"),
        ("weights", f"about {weights:,} bytes on each, which leave {left:,}"),
        ("state_bytes", f"{budget:,} on each; by default half of what the weights leave"),
        ("one state", f"{sizes.state:,} bytes on each, {config.state_dtype}, in {len(model.mixers)} recurrent layers"),
        ("one token log", f"{sizes.log:,} bytes on each, for each running request"),
        ("states", f"{states:,}"),
        ("requests at a time", f"{running:,}, of max_num_seqs {most:,}; half of the states are for cached prefixes"),
        (
            "KV blocks",
            f"at most {blocks:,}, {blocks * block:,} tokens; vLLM takes activations and CUDA graphs off this"
            if sizes.page
            else "none",
        ),
    ]
    print("\n".join(f"{name:<28}{value}" for name, value in rows))
    if note:
        print(note)


def _load(config: EngineConfig, device: str) -> tuple[Model, int, str | None]:
    """Return a model without weights, their bytes, and a note."""
    from mambacache.models.adapt import model_skeleton
    from mambacache.runner import sizing

    model = model_skeleton(config.model, config.dtype, device, config.revision)
    weights = sizing.expected_weight_bytes(model, config.model)
    if weights is not None:
        return model, weights, None
    note = f"{config.model} is quantised and its files are not here: weights are counted as if it were not."
    return model, sizing.weight_bytes(model), note


def _dtype(model: Model) -> str:
    if getattr(model.config, "quantization_config", None) is not None:
        return "the checkpoint's quantisation"
    return str(model.module.dtype).removeprefix("torch.")
