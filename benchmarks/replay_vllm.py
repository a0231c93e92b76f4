"""Replay a trace through vLLM's scheduler with the plugin, and report the share of the ceiling that is hit.

    python benchmarks/replay_vllm.py benchmarks/traces/mooncake_conversation.jsonl.gz [--requests 2000] [--agents N]
        [--model qwen3-next] [--budgets 5+20 20+40] [--rate 5] [--speed 120000] [--seeds 2] [--by-last-use]
        [--json OUT.json]

No model runs: this needs vLLM 0.32 or 0.33, and no GPU. A budget is GiB of states + GiB of KV. Requests come as a
Poisson process, and a step takes a time for each token: many requests run at once, as in a server. Seed 2 gives the
arrivals of bench_serving.py. With `--by-last-use` KV pages keep vLLM's order of eviction. Answers have the trace's
tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, islice, product
from pathlib import Path
from typing import Any

import torch
from replay_trace import MODELS
from simulators.agents import Traffic, setting
from simulators.parts import BLOCK, GIB
from tqdm import tqdm
from trace_tokens import Request, requests
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as ServedRequest
from vllm.v1.structured_output import StructuredOutputManager

from mambacache.vllm import scheduler as plugin

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 320, "max_position_embeddings": 1 << 18,
}  # fmt: skip
RUNNING, STEP = 64, 16_384  # requests at once, tokens of a step
SHORTEST_STEP = 0.006  # seconds


@dataclass
class Row:
    trace: str
    requests: int
    model: str
    state_gib: float
    kv_gib: float
    rate: float
    speed: float
    seed: int
    by_last_use: bool
    first_token_median: float  # seconds
    share: float


def scheduler_of(num_states: int, num_pages: int) -> Any:
    """Return the plugin's scheduler for a model that has attention, with pages of 64 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=1 << 18)
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=STEP, max_num_seqs=RUNNING, max_model_len=1 << 18, is_encoder_decoder=False
        ),
        device_config=DeviceConfig("cpu"),
        additional_config={"mambacache": {"num_state_blocks": num_states}},
    )
    config.scheduler_config.async_scheduling = False
    config.cache_config.num_gpu_blocks = num_pages
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["attention"], spec)]
    return plugin.make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_pages, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def replay(scheduler: Any, trace: Sequence[Request], rate: float, speed: float, seed: int) -> tuple[int, float]:
    """Return the tokens that prompts hit at their first admission, and the median time to the first token in seconds.

    Args:
        rate: requests a second.
        speed: tokens a second.
        seed: the seed of the arrivals.
    """
    init_none_hash(sha256)
    hasher, rng = get_request_block_hasher(BLOCK, sha256), random.Random(seed)
    arrivals = [*accumulate(rng.expovariate(rate) for _ in trace)]
    now, given, hits, waits = 0.0, 0, dict[str, int](), dict[str, float]()
    bar = tqdm(total=len(trace), mininterval=2, leave=False)
    while given < len(trace) or scheduler.has_requests():
        if not scheduler.has_requests():
            now = max(now, arrivals[given])
        while given < len(trace) and arrivals[given] <= now:
            params = SamplingParams(temperature=0, max_tokens=len(trace[given].answer), ignore_eos=True)
            prompt = trace[given].prompt.tolist()
            scheduler.add_request(ServedRequest(str(given), prompt, params, None, arrivals[given], block_hasher=hasher))
            given += 1
        output = scheduler.schedule()
        for new in output.scheduled_new_reqs:
            hits.setdefault(new.req_id, new.num_computed_tokens)
        sampled = [_sampled(scheduler.requests[name], trace[int(name)]) for name in output.num_scheduled_tokens]
        names = {name: place for place, name in enumerate(output.num_scheduled_tokens)}
        done = scheduler.update_from_output(output, ModelRunnerOutput([*names], names, sampled))
        now += max(sum(output.num_scheduled_tokens.values()) / speed, SHORTEST_STEP)
        for each in chain.from_iterable(outputs.outputs for outputs in done.values()):
            waits.setdefault(each.request_id, now - arrivals[int(each.request_id)])
            bar.update(each.finish_reason is not None)
    return sum(hits.values()), statistics.median(waits.values())


def _sampled(request: Any, wanted: Request) -> list[int]:
    ready = request.num_computed_tokens >= request.num_tokens
    return [int(wanted.answer[request.num_output_tokens])] if ready else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=2000, help="the trace's first")
    parser.add_argument("--agents", type=int, metavar="N", help="generated traffic in place of a trace")
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--budgets", nargs="+", default=["5+20", "20+40", "40+80"])
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--speed", type=float, default=120_000, help="tokens a second")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2], help="of the arrivals")
    parser.add_argument("--by-last-use", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (options.trace is None) == (options.agents is None):
        parser.error("give a trace, or --agents N")
    if min(options.rate, options.speed) <= 0:
        parser.error("--rate and --speed must be above 0")
    for budget in options.budgets:
        if not re.fullmatch(r"\d+(\.\d+)?\+\d+(\.\d+)?", budget):
            parser.error(f"{budget!r} is not a budget: give GiB of states and KV, as 20+40")
    if options.trace is not None:
        name, trace = options.trace.name.partition(".")[0], [*islice(requests(options.trace), options.requests)]
    else:
        name, trace = f"agents-{options.agents}", Traffic(setting(options.agents)).run()
    if options.by_last_use:
        plugin.PageQueue = lambda *_: None
    shape, ceiling = MODELS[options.model], sum(request.ceiling for request in trace)
    for budget, seed in product(options.budgets, options.seeds):
        states, pages = (float(part) for part in budget.split("+"))
        made = scheduler_of(int(states * GIB / shape.state_bytes), int(pages * GIB / shape.kv_bytes / BLOCK))
        hits, median = replay(made, trace, options.rate, options.speed, seed)
        run = options.rate, options.speed, seed, options.by_last_use
        row = Row(name, len(trace), options.model, states, pages, *run, median, hits / ceiling)
        print(f"{budget:8} {row.share:.4f} of the ceiling, first token after {median:.3f} s", flush=True)
        if options.json:
            write(options.json, row)


def write(path: Path, row: Row) -> None:
    """Add a row to a file in place of the row of the same run."""
    old = [Row(**each) for each in json.loads(path.read_text())["rows"]] if path.exists() else []
    found = {"first_token_median": row.first_token_median, "share": row.share}
    rows = [each for each in old if replace(each, **found) != row] + [row]
    path.write_text(json.dumps({"rows": [asdict(each) for each in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
