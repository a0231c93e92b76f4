"""`mambacache plan`: what a model's states and KV take."""

from __future__ import annotations

import argparse

from mambacache.cli.options import given_fields
from mambacache.config import EngineConfig


def run(args: argparse.Namespace) -> int:
    """Prints the sizes that an engine would choose."""
    config = EngineConfig(args.model, **given_fields(args, EngineConfig))
    from mambacache.models.adapt import model_skeleton
    from mambacache.runner.sizing import describe, free_memory, left_by_weights, plan_memory, resolve_device

    model = model_skeleton(config.model, config.dtype, resolve_device(config.device), config.revision)
    memory = free_memory(config.device) if args.memory is None else args.memory
    memory = int(memory * (config.gpu_memory_utilization or 1))
    print(describe(config, model, plan_memory(config, model, left_by_weights(model, memory)), memory))
    return 0
