"""Prefill and decode of our own engine, of vLLM with the plugin, or of vLLM alone, of several batches: the device's
time of the first step, which computes as many prompts as it holds, waits for the host included, and of all prompts'
kernels alone; seconds for 129 tokens each; of a decode step the device's time and the time from one to the next.

    python benchmarks/bench_decode.py MODEL [--engine ours|plugin|vllm] [--batches 64x64 256x64] [--drafts 3]
                                      [--label L] [--json OUT.json]

To set two versions against each other run each in turn on one machine, the other one with its folder in PYTHONPATH.
Of MODEL the configuration counts: weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from about import about
from gpu_timing import marked
from random_weights import random_weights
from torch.profiler import ProfilerActivity, profile

DECODED, RUNS, PREFILLS = 129, 5, 20
LIMITS = {"max_model_len": 2048, "max_num_batched_tokens": 16384, "gpu_memory_utilization": 0.6}


def measure(llm: Any, steps: tuple[Any, str], sampling: Callable[..., Any], rows: int, prompt: int) -> dict[str, Any]:
    """Medians; of prefill's kernels the mean, and of the longest of them the names' first 80 characters. The first
    token is part of the seconds, not of decode steps."""
    rng, prefills, times, device, period = random.Random(0), [], [], [], []

    def answer(tokens: int) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(250) for _ in range(prompt)]} for _ in range(rows)]
        params = sampling(max_tokens=tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    answer(DECODED)
    for _ in range(PREFILLS):
        with marked(*steps) as marks:
            answer(1)
        prefills.append(marks[0][0].elapsed_time(marks[0][1]))
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(RUNS):
            answer(1)
    kernels: Counter[str] = Counter()
    for each in profiler.key_averages():
        kernels[each.key[:80]] += each.self_device_time_total / 1e3 / RUNS
    for _ in range(RUNS):
        with marked(*steps) as marks:
            times.append(answer(DECODED))
        middle = marks[len(marks) // 4 : -2]  # with drafts there are fewer than tokens
        device.append(statistics.median(begin.elapsed_time(end) for begin, end in middle))
        period.append(statistics.median(first.elapsed_time(then) for (first, _), (then, _) in pairwise(middle)))
    medians = {"seconds": times, "prefill_ms": prefills, "device_ms": device, "period_ms": period}
    return {
        "rows": rows,
        "prompt": prompt,
        "steps": len(marks),
        "times": times,
        "prefills_ms": prefills,
        "prefill_kernels_ms": kernels.total(),
        "longest_kernels_ms": dict(kernels.most_common(15)),
    } | {name: statistics.median(each) for name, each in medians.items()}


def batch(text: str) -> tuple[int, int]:
    rows, tokens = text.split("x")
    return int(rows), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--engine", choices=("ours", "plugin", "vllm"), default="ours")
    parser.add_argument("--batches", type=batch, nargs="+", default=[(64, 64), (256, 64)], help="rows x tokens of each")
    parser.add_argument("--drafts", type=int, default=0, help="n-gram drafts a step")
    parser.add_argument("--in-turn", action="store_true", help="of ours, no step ahead of the tokens of the one before")
    parser.add_argument("--label", default="", help="of the figures: a version")
    parser.add_argument("--json", type=Path, help="where to add the figures")
    options = parser.parse_args()
    limits: dict[str, Any] = LIMITS | {"max_num_seqs": max(rows for rows, _ in options.batches)}
    if options.engine == "ours":
        from mambacache import LLM, SamplingParams

        sampling: Callable[..., Any] = SamplingParams
        if options.drafts:
            limits |= {"speculative": "ngram", "max_draft_tokens": options.drafts}
        with random_weights(options.model) as checkpoint:
            llm: Any = LLM(checkpoint, dtype="bfloat16", state_dtype="float32", seed=0, **limits)
        if options.in_turn:
            llm._step_loop.steps_ahead = 0
        steps: tuple[Any, str] = (llm.runner, "launch")
    else:
        os.environ |= {"MAMBACACHE": str(int(options.engine == "plugin")), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        import vllm

        if options.drafts:
            lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
            limits["speculative_config"] = lookup | {"num_speculative_tokens": options.drafts}
        sampling = partial(vllm.SamplingParams, detokenize=False)
        llm = vllm.LLM(
            options.model, load_format="dummy", dtype="bfloat16", mamba_ssm_cache_dtype="float32", seed=0,
            enable_prefix_caching=True, **limits,
        )  # fmt: skip
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        steps = (worker.model_runner, "execute_model")
    setting = {name: getattr(options, name) for name in ("label", "engine", "drafts", "in_turn")}
    result = about("torch", "triton") | setting | {"rows": []}
    for rows, prompt in options.batches:
        row = measure(llm, steps, sampling, rows, prompt)
        result["rows"].append(row)
        brief = "first step {prefill_ms:.2f} ms, kernels of prefill {prefill_kernels_ms:.2f} ms, {seconds:.3f} s, "
        brief += "{steps} steps, device {device_ms:.3f} ms, one every {period_ms:.3f} ms"
        print(options.label, options.engine, f"{rows} x {prompt}", brief.format(**row), flush=True)
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps([*known, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
