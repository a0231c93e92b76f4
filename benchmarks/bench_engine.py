"""Compare seconds and hits of vLLM with the plugin, vLLM alone and mambacache's engine on one model.

    python benchmarks/bench_engine.py benchmarks/models/qwen3.5-9b [--json OUT.json] [--engines ...] [--rounds N]

`--options` holds options of vLLM's `LLM` as JSON. Each engine runs in a new process in each round. Weights are random,
so that answers have no meaning. vLLM does not detokenise. Each workload runs once before it is timed. A row has the
times of all rounds. The file is written after each process.
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
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from about import about
from random_weights import random_weights
from tqdm import tqdm

ENGINES = ("ours", "plugin", "vllm", "vllm, FlashInfer")
REQUESTS, GROUPS = 64, 8
COLD = (16, 4096)  # prompts, and the tokens of each
ORDER = ("all at once", "one by one")
SHARED = ((1600, 600), (1500, 700))  # tokens shared by a group, and further tokens of each prompt, as in vllm#45238
ALONE, DECODED, VOCABULARY = 512, 256, 250
RUNS = 3
LIMITS = {
    "max_model_len": 16384,
    "max_num_seqs": REQUESTS,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.85,
}


@dataclass
class Row:
    """Holds the seconds of each run of a workload, and the hits of the last run."""

    workload: str
    engine: str
    times: list[float]
    hit_requests: int
    hit_tokens: int
    prompt_tokens: int


class Workload(NamedTuple):
    """Holds the prompts of each run; the first run is not timed."""

    name: str
    runs: list[list[list[int]]]
    answer: int = 1
    """Tokens of an answer."""
    one_by_one: bool = False
    """Send each prompt after the answer to the prompt before."""


def workloads() -> Iterator[Workload]:
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(VOCABULARY), k=count)

    def groups(shared: int, own: int) -> list[list[int]]:
        common = [tokens(shared) for _ in range(GROUPS)]
        return [common[i % GROUPS] + tokens(own) for i in range(REQUESTS)]

    count, length = COLD
    yield Workload(f"cold, {count} x {length}", [[tokens(length) for _ in range(count)] for _ in range(RUNS + 1)])
    for (shared, own), one_by_one in product(SHARED, (False, True)):
        name = f"{REQUESTS} x ({shared} shared by {REQUESTS // GROUPS} + {own}), {ORDER[one_by_one]}"
        yield Workload(name, [groups(shared, own) for _ in range(RUNS + 1)], one_by_one=one_by_one)
    for rows in (REQUESTS, 1):
        runs = [[tokens(ALONE) for _ in range(rows)] for _ in range(RUNS + 1)]
        yield Workload(f"decode {rows} x {DECODED} after {ALONE}", runs, answer=DECODED)


def run_workloads(llm: Any, params_of: Callable[[int], Any], engine: str) -> list[dict[str, Any]]:
    """Return the rows of an `LLM`; `params_of(n)` returns sampling parameters for n greedy tokens."""

    def run(prompts: list[list[int]], workload: Workload) -> tuple[float, list[int]]:
        inputs, params = [{"prompt_token_ids": prompt} for prompt in prompts], params_of(workload.answer)
        start = time.perf_counter()
        parts = [[each] for each in inputs] if workload.one_by_one else [inputs]
        outputs = [output for part in parts for output in llm.generate(part, params, use_tqdm=False)]
        return time.perf_counter() - start, [output.num_cached_tokens or 0 for output in outputs]

    rows = []
    for workload in tqdm(workloads(), desc=engine, total=3 + 2 * len(SHARED)):
        _, *done = [run(prompts, workload) for prompts in workload.runs]
        times, hits = [seconds for seconds, _ in done], done[-1][1]
        prompt_tokens = sum(map(len, workload.runs[-1]))
        rows.append(asdict(Row(workload.name, engine, times, sum(map(bool, hits)), sum(hits), prompt_tokens)))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def measure_vllm(arguments: argparse.Namespace, engine: str) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    backend = "flashinfer" if engine.endswith("FlashInfer") else "triton"
    options = LIMITS | {"additional_config": {"gdn_prefill_backend": backend}} | json.loads(arguments.options)
    llm = LLM(
        model=arguments.model, load_format="dummy", dtype="bfloat16", enable_prefix_caching=True,
        mamba_ssm_cache_dtype="float32", seed=0, **options,
    )  # fmt: skip
    rows = run_workloads(
        llm, lambda count: SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False), engine
    )
    llm.llm_engine.engine_core.shutdown()
    return rows


def measure_ours(arguments: argparse.Namespace, engine: str) -> list[dict[str, Any]]:
    from mambacache import LLM, SamplingParams

    with (
        random_weights(arguments.model) as checkpoint,
        LLM(checkpoint, dtype="bfloat16", state_dtype="float32", seed=0, **LIMITS) as llm,
    ):
        return run_workloads(
            llm, lambda count: SamplingParams(max_tokens=count, temperature=0, ignore_eos=True), engine
        )


def compare(arguments: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield all rows after each process; every second round reverses the order of engines."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for turn in range(arguments.rounds):
        for engine in arguments.engines[:: -1 if turn % 2 else 1]:
            for row in run_apart(arguments, engine):
                kept = rows.setdefault((row["workload"], engine), row | {"times": []})
                kept["times"] += row["times"]
                kept["seconds"] = statistics.median(kept["times"])
            yield list(rows.values())


def run_apart(arguments: argparse.Namespace, engine: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, arguments.model, "--engine", engine, "--json", str(out)]
        environment = os.environ | {"MAMBACACHE": "1" if engine == "plugin" else "0"}
        subprocess.run([*command, "--options", arguments.options], check=True, env=environment)
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json")
    parser.add_argument("--engines", nargs="+", default=["plugin", "vllm"], choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--options", default="{}", help='of vLLM, such as {"language_model_only": true}')
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        measure = measure_ours if arguments.engine == "ours" else measure_vllm
        Path(arguments.json).write_text(json.dumps(measure(arguments, arguments.engine)))
        return
    figures = about("torch", "triton", "transformers", *([] if arguments.engines == ["ours"] else ["vllm"]))
    figures |= {"model": Path(arguments.model).name, "options": json.loads(arguments.options)}
    for rows in compare(arguments):
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(figures | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
