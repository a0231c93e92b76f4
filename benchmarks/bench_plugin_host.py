"""What a decode step costs its host in vLLM's scheduler, a step ahead of its tokens, with the plugin's part and its
worker's, or alone. Needs no model and no GPU; the files of vLLM, as `make test-vllm` puts them there, are enough:

    PYTHONPATH=build/vllm-0.33.0 .venv-vllm/bin/python -P benchmarks/bench_plugin_host.py [--rows 64 256] [--alone]

To set two versions against each other run each in turn, the other one with its folder in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import deque
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from mambacache.kernels import StatePool, StateTensor
from mambacache.vllm.scheduler import make
from mambacache.vllm.step_context import StepContext

PAGE, PROMPT, WARM_UP, STEPS = 64, 64, 20, 300
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 256, "max_position_embeddings": 4096,
}  # fmt: skip


def make_scheduler(rows: int, alone: bool) -> Any:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=4096)
    pages = 16 * rows
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=PAGE, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=2 * PROMPT * rows, max_num_seqs=rows, max_model_len=4096, is_encoder_decoder=False
        ),
        device_config=DeviceConfig("cpu"),
        additional_config={"mambacache": {"num_state_blocks": 4 * rows}},
    )
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = pages
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    scheduler = (AsyncScheduler if alone else make)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(pages, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=PAGE,
        log_stats=True,
    )
    if not alone:
        scheduler._runner_v2 = True  # as on a GPU
    init_none_hash(sha256)
    hasher, rng = get_request_block_hasher(PAGE, sha256), random.Random(0)
    for i in range(rows):  # their logs are full in different steps
        prompt = [rng.randrange(256) for _ in range(PROMPT + i % 16)]
        params = SamplingParams(max_tokens=WARM_UP + STEPS + 80, ignore_eos=True)
        scheduler.add_request(Request(str(i), prompt, params, None, block_hasher=hasher))
    return scheduler


class Loop:
    """An engine's: the tokens of a step are read when the next one is on its way."""

    def __init__(self, rows: int, alone: bool) -> None:
        self.scheduler, self.rows = make_scheduler(rows, alone), rows
        tensors = [[StateTensor((1,), torch.float32)]]
        layer = SimpleNamespace(bind_states=lambda *_: None)
        pools = StatePool(tensors, 4 * rows, torch.device("cpu")), StatePool(tensors, rows, torch.device("cpu"))
        self.worker = None if alone else StepContext([layer], *pools, rows)
        self.out: deque[Any] = deque()

    def step(self) -> float:
        """Seconds of scheduler and worker."""
        start = time.perf_counter()
        output = self.scheduler.schedule()
        names, lengths = list(output.num_scheduled_tokens), np.array([*output.num_scheduled_tokens.values()])
        if self.worker is not None:
            decode = len(names) == self.rows and lengths.max() == 1
            self.worker.receive(getattr(output, "mambacache", None), output.finished_req_ids)
            self.worker.begin(names, lengths, (self.rows, self.rows) if decode else None)
            self.worker.end()
        spent = time.perf_counter() - start
        places = {name: i for i, name in enumerate(names)}
        self.out.append((output, ModelRunnerOutput(names, places, [[7] for _ in names])))
        if len(self.out) > 1:
            output, sampled = self.out.popleft()
            start = time.perf_counter()
            self.scheduler.update_from_output(output, sampled)
            spent += time.perf_counter() - start
        return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--alone", action="store_true", help="vLLM without the plugin")
    options = parser.parse_args()
    for rows in options.rows:
        loop = Loop(rows, options.alone)
        for _ in range(WARM_UP):
            loop.step()
        gc.collect()
        gc.freeze()  # as vLLM does once it has started
        times = sorted(1e3 * loop.step() for _ in range(STEPS))
        fifth, median = times[STEPS // 5], statistics.median(times)
        print(f"{rows} rows: a fifth of the steps takes up to {fifth:.3f} ms, the median {median:.3f}", flush=True)


if __name__ == "__main__":
    main()
