"""Compile kernels before the server is ready."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import Any

from tqdm import tqdm

from mambacache.kernels import compiling
from mambacache.plan import SequenceStep
from mambacache.vllm.log import logger
from mambacache.vllm.step_context import StepContext
from mambacache.warm_up import CompilerThreads, warm_up_batches

TILE_ENDS = {
    *(1, 3, 6, 12, 20, 28, 40, 56, 80, 112, 192, 384, 768, 1280, 1792, 2560, 3584),  # nearly all its tuned tables
    *(4608, 7168, 11264, 15360, 21504, 29696),  # some of them
    *(4, 8, 16, 32, 64, 96, 128, 512),  # without a table
}
"""Tokens of a step after which vLLM's `fused_moe_kernel` may take other tiles."""
DIVISOR = 16
"""Triton compiles another variant for a number that this divides."""


def warm_up(runner: Any, context: StepContext, config: Any) -> None:
    """Run batches that use every kernel of our layers and of vLLM's experts.

    Our kernels compile in parallel. With drafts each batch also runs with gathered activations.

    Args:
        runner: vLLM's model runner, before it captures graphs.
    """
    scheduler, drafts = config.scheduler_config, config.speculative_config
    width = 1 + (drafts.num_speculative_tokens if drafts is not None else 0)
    batches = warm_up_batches(
        scheduler.max_num_batched_tokens, config.model_config.max_model_len, scheduler.max_num_seqs, width
    )
    runs = list(product(batches, [False, True] if width > 1 else [False]))
    began = time.monotonic()
    with CompilerThreads() as threads, compiling(threads):
        _run(runner, context, runs)
    _run(runner, context, runs)
    routers = [module.router for module in runner.get_model().modules() if hasattr(module, "router")]
    shapes = {(router.global_num_experts, router.top_k) for router in routers if hasattr(router, "global_num_experts")}
    sizes = {size for shape in shapes for size in expert_sizes(*shape, scheduler.max_num_batched_tokens)}
    for size in tqdm(sorted(sizes), desc="experts", disable=None):
        runner._dummy_run(size, skip_eplb=True)
    logger.info("mambacache: kernels were ready after %.0f s", time.monotonic() - began)


def _run(runner: Any, context: StepContext, runs: Sequence[tuple[Sequence[SequenceStep], bool]]) -> None:
    for rows, gathered in runs:
        with context.warming(rows, gathered) as tokens:
            runner._dummy_run(tokens, skip_eplb=True)


def expert_sizes(experts: int, top_k: int, room: int) -> Iterable[int]:
    """Return tokens of steps that together use every variant of vLLM's `fused_moe_kernel`.

    The kernel's integers are the routed pairs of token and expert, and the pairs padded to tiles.

    Args:
        experts: experts of a layer, over all ranks.
        top_k: experts of a token.
        room: most tokens of a step.
    """
    unsorted, sparse, grouped = experts // (4 * top_k), experts // top_k, 129 * experts - 1
    ends = sorted(end for end in {*TILE_ENDS, unsorted, sparse, grouped, room} if 0 < end <= room)
    sizes: dict[tuple[int, bool, bool], int] = {}
    for start, end in pairwise([0, *ends]):
        for tokens in range(end, max(start, end - DIVISOR), -1):
            pairs = tokens * top_k
            padded = 0 if pairs <= experts else pairs - experts  # modulo DIVISOR, which divides tiles
            sizes.setdefault((end, pairs % DIVISOR == 0, padded % DIVISOR == 0), tokens)
    return sizes.values()
