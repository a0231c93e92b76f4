"""Compile kernels before the server is ready."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from mambacache.kernels import compiling
from mambacache.plan import SequenceStep
from mambacache.vllm.log import logger
from mambacache.vllm.step_context import StepContext
from mambacache.warm_up import CompilerThreads, warm_up_batches


def warm_up(runner: Any, context: StepContext, config: Any) -> None:
    """Run batches that use every kernel of our layers, first to compile the kernels in parallel.

    With drafts each batch also runs with gathered activations.

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
    logger.info("mambacache: kernels were ready after %.0f s", time.monotonic() - began)


def _run(runner: Any, context: StepContext, runs: Sequence[tuple[Sequence[SequenceStep], bool]]) -> None:
    for rows, gathered in runs:
        with context.warming(rows, gathered) as tokens:
            runner._dummy_run(tokens, skip_eplb=True)
