"""mambacache's own engine, and vLLM with the plugin and without it, one after the other in one run: prompts that share
a prefix, decoding.

    python benchmarks/bench_engine.py MODEL [--json OUT.json] [--engines ...] [--in-process] [--mode MODE] [--rounds N]

Each engine runs in a process of its own, in each round again, in turn; with random weights: times and hits mean
something, texts do not. Nothing is detokenised. Of each workload the median over all rounds, beside the best: two runs
a round (cold), four (nothing cached), seven (hits) or three (decode) after one to warm up. The file is written anew
after each process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from about import about
from kernel_peers import activate_flashinfer
from random_weights import random_weights
from vllm_host_time import host_time

REQUESTS = 64
HOST_MS = f"host time of a decode step of {REQUESTS} rows that is the plugin's, ms"
IDLE = f"share of a decode step of {REQUESTS} rows in which the device waits for the host"
ENGINES = ("ours", "plugin", "vllm", "vllm, FlashInfer")
VOCABULARY, DECODED = 250, 128
LIMITS = {
    "max_model_len": 16384,
    "max_num_seqs": REQUESTS,
    "max_num_batched_tokens": 16384,
    "gpu_memory_utilization": 0.5,
}
SHARED = ((4096, 64), (4001, 512))  # tokens in common, and of each prompt's own


@dataclass
class Row:
    """One workload: seconds of all requests together, run by run, and what the engine counts as hit in the last."""

    workload: str
    engine: str
    times: list[float]
    hit_tokens: int
    prompt_tokens: int


def workloads(llm: Any, params_of: Callable[[int], Any], engine: str) -> Iterator[Row]:
    """Of an `LLM` of vLLM's or ours; `params_of` gives the sampling parameters of so many greedy tokens."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    def run(prompts: list[list[int]], output: int) -> tuple[float, int]:
        params = params_of(output)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return time.perf_counter() - start, sum(each.num_cached_tokens or 0 for each in outputs)

    def row(name: str, batches: list[list[list[int]]], output: int) -> Row:
        done = [run(batch, output) for batch in batches]
        return Row(name, engine, [each[0] for each in done], done[-1][1], sum(map(len, batches[-1])))

    for shared, own in SHARED:
        cold = [[tokens(shared + own) for _ in range(REQUESTS)] for _ in range(3)]
        bursts = [[common + tokens(own) for _ in range(REQUESTS)] for common in [tokens(shared) for _ in range(5)]]
        for warm_up in (cold[0], bursts[0]):
            run(warm_up, 1)
        yield row(f"cold, {REQUESTS} x {shared + own}", cold[1:], 1)
        yield row(f"{REQUESTS} x ({shared} shared + {own}) at once, nothing cached", bursts[1:], 1)
        common = tokens(shared)
        for _ in range(2):
            run([common + tokens(own)], 1)
        batches = [[common + tokens(own) for _ in range(REQUESTS)] for _ in range(8)]
        run(batches[0], 1)
        yield row(f"{REQUESTS} x ({shared} shared + {own})", batches[1:], 1)
    for count in (REQUESTS, 1):
        batches = [[tokens(512) for _ in range(count)] for _ in range(4)]
        run(batches[0], DECODED)
        yield row(f"decode {count} x {DECODED} after 512", batches[1:], DECODED)


def host_ms(llm: Any) -> float:
    """Of a decode step of all rows, in the plugin: the median over the middle of three runs."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True, detokenize=False)
    with host_time(llm.llm_engine.engine_core.engine_core.scheduler) as spent:
        middle = []
        for turn in range(3):
            prompts = [{"prompt_token_ids": [2 + turn, request, *range(2, 100)]} for request in range(REQUESTS)]
            spent.steps.clear()
            llm.generate(prompts, params, use_tqdm=False)
            middle += spent.steps[30:110]
    return 1e3 * statistics.median(middle)


def idle_share(llm: Any) -> float:
    """Of the device's time in decode steps of all rows of ours, the share in which it waits for the host: from the end
    of a step to the beginning of the next, by events on its stream."""
    from gpu_timing import marked

    from mambacache import SamplingParams

    prompts = [{"prompt_token_ids": [request, *range(100)]} for request in range(REQUESTS)]
    params = SamplingParams(max_tokens=2 * DECODED, temperature=0, ignore_eos=True)
    with marked(llm.runner, "launch") as marks:
        llm.generate(prompts, params, use_tqdm=False)
    middle = marks[DECODED // 2 : -DECODED // 2]
    idle = sum(end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(middle))
    return idle / middle[0][0].elapsed_time(middle[-1][1])


def rows_of(llm: Any, params_of: Callable[[int], Any], engine: str) -> dict[str, Any]:
    rows = []
    for row in workloads(llm, params_of, engine):
        times = ", ".join(f"{each:.3f}" for each in row.times)
        print(f"{engine:18}{row.workload:50}{times} s, hit {row.hit_tokens:,}", flush=True)
        rows.append(asdict(row))
    return {"rows": rows}


def measure_vllm(arguments: argparse.Namespace, engine: str) -> dict[str, Any]:
    """vLLM, in this process, with the plugin or without; the rows, and with it its host time."""
    from vllm import LLM, SamplingParams

    backend = "flashinfer" if engine.endswith("FlashInfer") else "triton"
    if backend == "flashinfer":
        activate_flashinfer()
    options: dict[str, Any] = {"additional_config": {"gdn_prefill_backend": backend}}
    if arguments.mode != "default":
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": arguments.mode}
    llm = LLM(
        model=arguments.model, load_format="dummy", dtype="bfloat16", enable_prefix_caching=True,
        mamba_ssm_cache_dtype="float32", seed=0, **LIMITS, **options,
    )  # fmt: skip
    result = rows_of(
        llm, lambda count: SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False), engine
    )
    if engine == "plugin" and arguments.in_process:
        result["host_ms"] = host_ms(llm)
        print(f"{engine:18}{HOST_MS}: {result['host_ms']:.2f}")
    llm.llm_engine.engine_core.shutdown()
    return result


def measure_ours(arguments: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Our own engine, in this process, with vLLM's share of the GPU for weights, states and KV."""
    from mambacache import LLM, SamplingParams

    with (
        random_weights(arguments.model) as checkpoint,
        LLM(checkpoint, dtype="bfloat16", state_dtype="float32", seed=0, **LIMITS) as llm,
    ):
        result = rows_of(llm, lambda count: SamplingParams(max_tokens=count, temperature=0, ignore_eos=True), engine)
        if llm.runner.states.buffer.is_cuda:
            result["idle_share"] = idle_share(llm)
            print(f"{engine:18}{IDLE}: {result['idle_share']:.3f}")
        return result


def compare(arguments: argparse.Namespace) -> Iterator[tuple[list[dict[str, Any]], dict[str, list[float]]]]:
    """Every engine in a process of its own, which another follows in each round. After each of them: the rows so far,
    and what else was measured, by round: the plugin's host times, and how long our device idles."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    beside: dict[str, list[float]] = {}
    for turn in range(arguments.rounds):
        for engine in arguments.engines[:: -1 if turn % 2 else 1]:
            result = run_apart(arguments, engine)
            for key, name in (("host_ms", "host_ms_of_a_decode_step"), ("idle_share", "idle_share_of_a_decode_step")):
                beside.setdefault(name, []).extend([result[key]] if key in result else [])
            for row in result["rows"]:
                of_all = rows.setdefault((row["workload"], engine), row | {"times": []})
                of_all["times"] += row["times"]
                of_all |= {"seconds": statistics.median(of_all["times"]), "best": min(of_all["times"])}
            yield list(rows.values()), {name: values for name, values in beside.items() if values}


def run_apart(arguments: argparse.Namespace, engine: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, arguments.model, "--engine", engine, "--json", str(out)]
        environment = os.environ | {
            "MAMBACACHE": "1" if engine == "plugin" else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if arguments.in_process else "1",
        }
        command += ["--in-process"] if arguments.in_process else []
        subprocess.run([*command, "--mode", arguments.mode], check=True, env=environment)
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json")
    parser.add_argument(
        "--engines", nargs="+", default=ENGINES[:3], choices=ENGINES, help="the first is set against all"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--in-process", action="store_true", help="the engine core in the process of its caller")
    parser.add_argument(
        "--mode", default="default", help="of CUDA graphs, without torch.compile; default: vLLM's own, with it"
    )
    arguments = parser.parse_args()
    if arguments.engine:
        measure = measure_ours if arguments.engine == "ours" else measure_vllm
        Path(arguments.json).write_text(json.dumps(measure(arguments, arguments.engine)))
        return
    figures = about("torch", "triton", "transformers", *([] if arguments.engines == ["ours"] else ["vllm"]))
    figures |= {"mode": arguments.mode, "in_process": arguments.in_process, "rounds": arguments.rounds}
    for rows, beside in compare(arguments):
        figures |= beside
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(figures | {"rows": rows}, indent=1) + "\n")
    for workload in dict.fromkeys(row["workload"] for row in rows):
        times = {row["engine"]: row["seconds"] for row in rows if row["workload"] == workload}
        first = times[arguments.engines[0]]
        ratios = [f"{first / seconds:.2f} of {engine}" for engine, seconds in times.items()]
        print(f"{workload:50} {arguments.engines[0]}: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
