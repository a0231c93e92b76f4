"""Serve NaN logits in vLLM with the plugin: `python nan_run.py _ DIRECTORY [ahead]`. A GPU serves the recall model.

A NaN in an embedding is one bad request. A NaN in a block of a pool is a fault from outside the request.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "MAMBACACHE": "1",
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

import torch
from vllm import SamplingParams
from watched import LAST_ANSWER

from engine_driver import Original, tokens_of

BAD = 3
"""This token has a NaN embedding while a bad request runs."""

VOCABULARY = 136
"""This is the recall model's vocabulary, the smaller of two."""


class Served:
    """Serve a model, with access to its embeddings and pools."""

    def __init__(self, llm: Any, original: Original | None) -> None:
        self.llm, self.original = llm, original
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}
        core = self.llm.llm_engine.engine_core.engine_core
        self.states, self.scheduler = core.scheduler.prefix_cache, core.scheduler
        worker = core.model_executor.driver_worker.worker
        self.pool, self.caches = worker.step_context.pool, worker.model_runner.kv_caches
        self.embedding = next(
            weight for name, weight in worker.model_runner.model.named_parameters() if "embed_tokens" in name
        ).data

    def ask(self, prompt: Sequence[int], right: bool = True) -> int:
        """Return the tokens that a prompt hits. Check its answer if it must be right."""
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        if right and self.original is not None:
            self.original.check(prompt, output.outputs[0].token_ids)
        elif right:
            assert self.answers.setdefault(tuple(prompt), output.outputs[0].token_ids) == output.outputs[0].token_ids
        self.states.check()
        self.clear_free_pages()
        return int(output.num_cached_tokens)

    def ask_badly(self, prompt: Sequence[int]) -> int:
        before = self.embedding[BAD].clone()
        self.embedding[BAD] = torch.nan
        hit = self.ask(prompt, right=False)
        self.embedding[BAD] = before
        return hit

    def pages(self, page: int) -> list[torch.Tensor]:
        """Return the views of a page in each layer."""
        count = self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        dims = [next(dim for dim in (1, 0) if cache.shape[dim] == count) for cache in self.caches]
        return [cache.select(dim, page) for cache, dim in zip(self.caches, dims, strict=True)]

    def clear_free_pages(self) -> None:
        """Clear the pages without a hash: vLLM's attention on a CPU reads the NaN behind a row's last token."""
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            for view in self.pages(block.block_id) if block.block_hash is None else ():
                view.zero_()


def prompt_of(seed: int, count: int) -> list[int]:
    return [token % VOCABULARY + (token % VOCABULARY == BAD) for token in tokens_of(seed, count)]


def a_bad_prompt_leaves_nothing_and_takes_nothing(served: Served) -> None:
    shared = prompt_of(1, 150)
    bad = [*shared, BAD, *prompt_of(2, 120)]
    assert served.ask(shared) == 0
    assert served.ask_badly(bad) == 128
    assert served.ask(shared) == 128, "a bad request costs others their prefix"
    assert served.ask(bad) == 128, "a bad request's own blocks are hit"
    assert served.ask(bad) == 256


def a_bad_state_from_elsewhere_is_dropped(served: Served) -> None:
    prompt = prompt_of(3, 150)
    states = served.states._admission.pool
    known = set(states._blocks)
    served.ask(prompt)
    for block_hash, block in states._blocks.items():
        if block_hash not in known:
            served.pool.slabs[block].fill_(0xFF)
    assert served.ask(prompt, right=False) == 128
    served.ask(prompt_of(4, 10))  # a step that asks, if no step did
    assert served.ask(prompt) == 0 and served.ask(prompt) == 128


def a_bad_page_from_elsewhere_is_dropped(served: Served) -> None:
    prompt, pages = prompt_of(5, 150), served.scheduler.kv_cache_manager.block_pool
    known = set(pages.cached_block_hash_to_block._cache)
    served.ask(prompt)
    (page, *_) = [
        block.block_id
        for block_hash, block in pages.cached_block_hash_to_block._cache.items()
        if block_hash not in known
    ]
    for view in served.pages(page):
        view.fill_(torch.nan)
    assert served.ask(prompt, right=False) == 128
    served.ask(prompt_of(6, 10))
    served.ask(prompt)
    assert served.ask(prompt) == 128


def on_gpu() -> Served:
    from recall_run import serve

    return Served(serve("default", 1), None)


def on_cpu(directory: Path, ahead: bool) -> Served:
    from family_run import OPTIONS
    from request_run import MODEL, schedule_ahead
    from vllm import LLM

    from tiny_models import save_tiny_model

    torch._dynamo.config.disable = True
    if ahead:
        schedule_ahead()
    save_tiny_model("qwen3_next_moe", directory, **MODEL)
    return Served(LLM(str(directory), **OPTIONS), Original(directory))


def main(directory: Path, ahead: bool) -> None:
    served = on_gpu() if torch.cuda.is_available() else on_cpu(directory, ahead)
    a_bad_prompt_leaves_nothing_and_takes_nothing(served)
    a_bad_state_from_elsewhere_is_dropped(served)
    a_bad_page_from_elsewhere_is_dropped(served)
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[2]), "ahead" in sys.argv[3:])
