"""`mambacache plan`: what a model's states and KV take."""

from __future__ import annotations

import argparse

from mambacache.cli.options import given_fields
from mambacache.config import EngineConfig


def run(args: argparse.Namespace) -> int:
    """Prints the sizes that an engine would choose."""
    config = EngineConfig(args.model, **given_fields(args, EngineConfig))
    from mambacache.models.adapt import model_skeleton
    from mambacache.runner import sizing

    device = sizing.resolve_device(config.device)
    model = model_skeleton(config.model, config.dtype, device, config.revision)
    weights, free = sizing.expected_weight_bytes(model, config.model), args.memory
    if weights is None:
        weights = sizing.weight_bytes(model)
        print("The checkpoint is quantised and its files are not here: weights are counted as if it were not.")
    if free is None:
        free = sizing.free_memory(device)
    total = sizing.total_memory(device) if args.memory is None else free
    usable = sizing.usable_memory(config, weights, total, free - weights)
    print(sizing.describe(config, model, sizing.plan_memory(config, model, usable), weights, usable))
    return 0
