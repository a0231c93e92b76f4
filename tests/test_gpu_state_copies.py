"""What an engine runs on the GPU: nothing copies a state, whatever the cache does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine_driver import Engines, ask, greedy, hits, tokens_of
from mambacache import LLM

pytestmark = pytest.mark.gpu

SHARED = tokens_of(1, 200)
PROMPTS = [[*SHARED, *tokens_of(seed, 90)] for seed in (2, 2, 3, 4)]
ANSWER = greedy(40)  # crosses a boundary
# Steps of one chunk or one token: those that a hit leaves have the shapes of others, and so the same matrix products.
OPTIONS = {"max_num_batched_tokens": 64}


@pytest.fixture
def engines(tiny_model: Callable[[str], Path]) -> Iterator[Engines]:
    with Engines(tiny_model, "cuda") as engines:
        yield engines


@dataclass
class Trace:
    kernels: set[str]
    copies: list[int]
    """Bytes of every copy from the GPU to itself."""
    uploads: list[str]
    """What every copy from the host to the GPU is called."""


def traced(call: Callable[[], object], directory: Path) -> Trace:
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(directory / "trace.json"))
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    kernels = {event["name"] for event in events if event.get("cat") == "kernel"}
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    assert kernels
    return Trace(
        kernels,
        [event["args"]["bytes"] for event in copies if "DtoD" in event["name"]],
        [event["name"] for event in copies if "HtoD" in event["name"]],
    )


def state_bytes(llm: LLM) -> int:
    """Of the smallest layer."""
    return min(sum(tensor[0].nbytes for tensor in layer) for layer in llm.runner.states.layers)


@pytest.mark.parametrize("model", ["qwen3_next", "kimi_linear", "zamba2", "jamba"])
def test_no_copy_in_more_than_a_hundred_steps(engines: Engines, model: str, tmp_path: Path) -> None:
    """Hits, boundaries and commits run what the same requests run with the cache off. A step is one upload."""
    traces = []
    for cached in (True, False):
        llm = engines(model, enable_prefix_caching=cached, **OPTIONS)
        ask(llm, [tokens_of(9, 290)], ANSWER)
        outputs = []
        with patch.object(llm.runner, "execute", side_effect=llm.runner.execute) as steps:
            trace = traced(lambda llm=llm, outputs=outputs: outputs.extend(ask(llm, PROMPTS, ANSWER, False)), tmp_path)
        assert hits(outputs) == ([0, 256, 192, 192] if cached else [0] * 4)
        assert max(trace.copies, default=0) < state_bytes(llm)
        assert trace.uploads == ["Memcpy HtoD (Pinned -> Device)"] * steps.call_count and steps.call_count > 100
        traces.append(trace)
    engines.check()
    on, off = traces
    assert on.kernels == off.kernels


def test_the_trace_sees_a_planted_copy(tmp_path: Path) -> None:
    pool = torch.zeros(4, 1 << 16, device="cuda")
    assert max(traced(lambda: pool[1].copy_(pool[2]), tmp_path).copies) == pool[1].nbytes
