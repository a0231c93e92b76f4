"""Answer with drafts on a GPU, a step ahead of their verification, and compare each token with a prefill of the answer.

The drafts are n-grams by default. The script is a process of its own:

`python drafts_run.py MODEL OUT.json [OPTIONS as JSON]`
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from logits_run import let_load
from vllm import LLM, SamplingParams

DRAFTS, ANSWER, ROWS = 3, 120, 40
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "max_model_len": 1024, "max_num_seqs": ROWS,
    "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8 << 30, "seed": 0,
    "enable_prefix_caching": True, "skip_tokenizer_init": True, "disable_log_stats": False,
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    },
    "additional_config": {"mambacache": {"num_state_blocks": 256}},
}  # fmt: skip


def watch(core: Any, counts: Counter[str]) -> None:
    """Count steps, rows that may be late, and steps that ran as a full graph."""
    states, runner = core.scheduler.prefix_cache, core.model_executor.driver_worker.worker.model_runner
    plan, replay = states.plan_rows, runner.cudagraph_manager.run_fullgraph

    def plan_rows(steps: Any) -> Any:
        rows = plan(steps)
        counts["steps"] += 1
        counts["late"] += sum(row.unplaced_by > 0 for row in rows)
        counts["folded late"] += sum(row.unplaced_by > 0 and row.dst > 0 for row in rows)
        return rows

    def run_fullgraph(*args: Any) -> Any:
        counts["graphs"] += 1
        return replay(*args)

    states.plan_rows, runner.cudagraph_manager.run_fullgraph = plan_rows, run_fullgraph


def note_compiled_kernels() -> list[str]:
    """Return a list that receives the names of our kernels that compile from now on."""
    compiled: list[str] = []

    def note(*, fn: Any, **rest: Any) -> None:
        if fn.module.startswith("mambacache."):
            compiled.append(fn.name)

    triton.knobs.runtime.jit_post_compile_hook = note
    return compiled


def answer_random_batches(llm: LLM, rng: random.Random) -> None:
    for _ in range(12):
        prompts = [
            [rng.randrange(2, 250) for _ in range(rng.choice([1, 3, 64, rng.randint(2, 700)]))] for _ in range(ROWS)
        ]
        prompts = prompts[: rng.randint(1, ROWS)]
        params = [
            SamplingParams(temperature=0, max_tokens=rng.randint(1, 40), ignore_eos=True, detokenize=False)
            for _ in prompts
        ]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def main() -> None:
    rng, counts = random.Random(0), Counter[str]()
    let_load(json.loads(Path(sys.argv[1], "config.json").read_text()))
    llm = LLM(sys.argv[1], **OPTIONS | json.loads("".join(sys.argv[3:]) or "{}"))
    core = llm.llm_engine.engine_core.engine_core
    watch(core, counts)
    compiled = note_compiled_kernels()
    shared = [rng.randrange(2, 250) for _ in range(150)]
    prompts = [shared[: rng.choice([0, 70, 150])] + [rng.randrange(2, 250) for _ in range(rng.randint(1, 90))] * 2
               for _ in range(ROWS)]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    answers = [
        list(each.outputs[0].token_ids)
        for each in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    ]
    accepted = next(each.value for each in llm.get_metrics() if each.name == "vllm:spec_decode_num_accepted_tokens")
    whole = [{"prompt_token_ids": [*prompt, *answer]} for prompt, answer in zip(prompts, answers, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    behind: list[float] = []  # each token's log-probability subtracted from the best token's
    for prompt, answer, found in zip(prompts, answers, llm.generate(whole, params, use_tqdm=False), strict=True):
        for token, logprobs in zip(answer, found.prompt_logprobs[len(prompt) :], strict=True):
            behind.append(max(each.logprob for each in logprobs.values()) - logprobs[token].logprob)
    answer_random_batches(llm, rng)
    core.scheduler.prefix_cache.check()
    result = {
        "scheduler": type(core.scheduler).__name__, "accepted": accepted, **counts, "tokens": len(behind),
        "compiled": compiled, "behind": sorted(behind)[-20:], "best": sum(each == 0 for each in behind) / len(behind),
    }  # fmt: skip
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
