"""Serve a tiny model by processes of their own: `python process_run.py CASE DIRECTORY [again]`.

With `again` they find states in the files of an earlier run. Engine core and workers are children of this process,
which sees their answers alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

from watched import LAST_ANSWER

# Two ranks can share these heads.
DIVIDED = {"num_attention_heads": 4, "num_key_value_heads": 2}
STAGE = ["linear_attention", "full_attention"]
STATES = {"additional_config": {"mambacache": {"state_bytes": "4MB"}}}  # workers tell the scheduler how many states fit
FEW_STATES = {  # without host memory two hits of the second turn are lost
    "additional_config": {"mambacache": {"state_bytes": "300KB", "state_host_bytes": "40MB"}},
    "max_num_seqs": 2,
}
FILES = {"state_bytes": "4MB", "state_host_bytes": "40MB"}
# On a CPU vLLM makes the tensors that a second stage receives into when it warms up, and not in eager mode.
PIPELINE = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # model, changed settings, options of vLLM
    "engine": ("qwen3_next_moe", {}, {}),
    "tensor": ("qwen3_next_moe", DIVIDED, {"tensor_parallel_size": 2}),
    "tensor_host": ("qwen3_next_moe", DIVIDED, {"tensor_parallel_size": 2, **FEW_STATES}),
    "tensor_files": ("falcon_mamba", {}, {"tensor_parallel_size": 2}),  # needs no connector: it has no KV
    "tensor_mamba2": ("falcon_h1", DIVIDED, {"tensor_parallel_size": 2}),
    "pipeline": ("qwen3_next_moe", {"layer_types": 2 * STAGE}, PIPELINE),
    "pipeline_refused": ("qwen3_next_moe", {}, PIPELINE),
    "data": ("falcon_h1", {}, {"data_parallel_size": 2}),
}


def serve(directory: Path, options: dict[str, Any], prompts: list[list[int]], turns: int) -> tuple[Any, list[Any]]:
    """Return the engine, and the outputs of all prompts, turn after turn."""
    from vllm import LLM

    llm = LLM(str(directory), **options)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm, [llm.generate(requests, params(), use_tqdm=False) for _ in range(turns)]


async def serve_ranks(
    directory: Path, options: dict[str, Any], prompts: list[list[int]], turns: int
) -> tuple[Any, list[Any]]:
    """Return the engine, and the outputs of each data parallel rank in turn. Each rank has a cache of its own."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(directory), **options))

    async def answer(prompt: list[int], name: str, rank: int) -> Any:
        request = {"prompt_token_ids": prompt}
        async for output in llm.generate(request, params(), name, data_parallel_rank=rank):
            last = output
        return last

    rounds = []
    for turn in range(turns):
        for rank in range(options["data_parallel_size"]):
            asked = [answer(prompt, f"{turn} {rank} {number}", rank) for number, prompt in enumerate(prompts)]
            rounds.append(await asyncio.gather(*asked))
    return llm, rounds


def params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


def main(case: str, directory: Path, again: bool) -> None:
    # At the top of the file each spawned child would import them too.
    from family_run import CHANGES, HITS, OPTIONS, PROMPTS, check

    from engine_driver import Original, tokens_of
    from tiny_models import save_tiny_model

    name, changes, parallel = CASES[case]
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if case.endswith("files"):
        parallel = {**parallel, "additional_config": {"mambacache": FILES | {"state_disk_dir": f"{directory} states"}}}
    if not again:
        save_tiny_model(name, directory, **CHANGES.get(name, {}) | changes)
    ranks = parallel.get("data_parallel_size", 1)
    prompts = list(PROMPTS)
    if case == "tensor_host":  # these states save more than those of `PROMPTS`, and evict them from the device
        prompts += [tokens_of(seed, 400) for seed in range(10, 18)]
    given = (directory, OPTIONS | STATES | parallel, prompts, len(HITS))
    llm, rounds = asyncio.run(serve_ranks(*given)) if ranks > 1 else serve(*given)
    original = Original(directory)
    for number, outputs in enumerate(rounds):
        hits = [*HITS[1 if again else number // ranks]]
        if case == "tensor_host" and number:
            hits[4] = ANY  # a copy of this state may come too late
        check(original, outputs[: len(PROMPTS)], hits)
    print(LAST_ANSWER, flush=True)
    if ranks > 1:
        llm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "again" in sys.argv[3:])
