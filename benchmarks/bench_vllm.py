"""vLLM with mambacache's plugin and without it, and mambacache's own engine, one after the other in one run: prompts
that share a prefix, decoding.

    python benchmarks/bench_vllm.py MODEL [--json OUT.json] [--engines ...] [--in-process] [--mode MODE] [--rounds N]

Each engine runs in a process of its own, in each round again, in turn; with dummy weights: times and hits mean
something, texts do not. Nothing is detokenised. Of each workload the median over all rounds, beside the best: two runs
a round (cold), four (nothing cached), seven (hits) or three (decode) after one to warm up.
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
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from about import about
from vllm_host_time import host_time

REQUESTS = 64
HOST_MS = f"host time of a decode step of {REQUESTS} rows that is the plugin's, ms"
ENGINES = ("plugin", "vllm", "vllm, FlashInfer", "ours")
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
    """One workload: seconds of all requests together, run by run, and what vLLM counts as hit in the last."""

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


def activate_flashinfer() -> None:
    """Where its prefill alone was put on the path, and not the package: vLLM must have looked for that before."""
    with suppress(ImportError):
        import vllm.utils.flashinfer  # noqa: F401, I001
        from vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 import is_available

        import fi_gdn

        is_available()

        fi_gdn.activate()


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
    """Our own engine, in this process, without a tokenizer; its random weights are saved first, since it reads some."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from mambacache import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(arguments.model)
        AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(folder)
        with LLM(folder, dtype="bfloat16", seed=0, **LIMITS) as llm:
            return rows_of(llm, lambda count: SamplingParams(max_tokens=count, temperature=0, ignore_eos=True), engine)


def compare(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[float]]:
    """Every engine in a process of its own, which another follows in each round: rows, and the plugin's host times."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    host = []
    for turn in range(arguments.rounds):
        for engine in arguments.engines[:: -1 if turn % 2 else 1]:
            result = run_apart(arguments, engine)
            host += [result["host_ms"]] if "host_ms" in result else []
            for row in result["rows"]:
                rows.setdefault((row["workload"], engine), row | {"times": []})["times"] += row["times"]
    for row in rows.values():
        row |= {"seconds": statistics.median(row["times"]), "best": min(row["times"])}
    return list(rows.values()), host


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
        "--engines", nargs="+", default=ENGINES[:2], choices=ENGINES, help="the first is set against all"
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
    rows, host = compare(arguments)
    for workload in dict.fromkeys(row["workload"] for row in rows):
        times = {row["engine"]: row["seconds"] for row in rows if row["workload"] == workload}
        first = times[arguments.engines[0]]
        ratios = [f"{first / seconds:.2f} of {engine}" for engine, seconds in times.items()]
        print(f"{workload:50} {arguments.engines[0]}: {', '.join(ratios)}")
    if arguments.json:
        figures = about("torch", "triton", "vllm", "transformers")
        figures |= {"mode": arguments.mode, "in_process": arguments.in_process, "rounds": arguments.rounds}
        figures |= {"host_ms_of_a_decode_step": host} if host else {}
        Path(arguments.json).write_text(json.dumps(figures | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
