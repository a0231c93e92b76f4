"""`mambacache plan`: what a model's states and KV take."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mambacache.cli.options import given_fields
from mambacache.config import EngineConfig

if TYPE_CHECKING:
    from mambacache.models.adapt import Model


def run(args: argparse.Namespace) -> int:
    """Prints the sizes that an engine would choose."""
    config = EngineConfig(args.model, **given_fields(args, EngineConfig))
    from mambacache.engine.draft_model import DRAFT_SHARE, draft_config
    from mambacache.runner import sizing

    device = sizing.resolve_device(config.device)
    model, weights = _load(config, device)
    free = sizing.free_memory(device) if args.memory is None else args.memory
    total = sizing.total_memory(device) if args.memory is None else free
    drafting = draft_config(config)
    if drafting is not None:
        try:
            draft_model, taken = _load(drafting, device)
            usable = sizing.usable_memory(config, weights + taken, total, free - weights - taken)
            memory = sizing.plan_memory(drafting, draft_model, int(DRAFT_SHARE * usable)).device_bytes
        except ValueError as error:
            raise ValueError(f"speculative is {str(config.speculative)!r}: {error}") from error
        print(f"{'draft model':<28}{taken:,} bytes of weights, {memory:,} of states and KV: counted as weights below")
        weights += taken + memory
    usable = sizing.usable_memory(config, weights, total, free - weights)
    print(sizing.describe(config, model, sizing.plan_memory(config, model, usable), weights, usable))
    return 0


def _load(config: EngineConfig, device: str) -> tuple[Model, int]:
    """A model without its weights, and the bytes that they will take."""
    from mambacache.models.adapt import model_skeleton
    from mambacache.runner import sizing

    model = model_skeleton(config.model, config.dtype, device, config.revision)
    weights = sizing.expected_weight_bytes(model, config.model)
    if weights is None:
        weights = sizing.weight_bytes(model)
        print(f"{config.model} is quantised and its files are not here: weights are counted as if it were not.")
    return model, weights
