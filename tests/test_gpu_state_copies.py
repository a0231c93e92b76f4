"""Check that an engine never copies a state on the GPU."""

from __future__ import annotations

import json
import re
from collections import Counter
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
OPTIONS = {"max_num_batched_tokens": 64}  # steps of one chunk or one token: steps after a hit are like others
# More than a product's shape decides which of these it takes. None of them copies anything.
PRODUCTS = re.compile("gemm|gemv|cutlass|nvjet|splitK|dot_kernel|reduce_1Block")
# By its name, small copies of a graph, the same in every replay. In some runs one of two engines has none. A state
# copied under this name would not be seen here.
OF_GRAPHS = "memcpy32_post"


@pytest.fixture
def engines(tiny_model: Callable[[str], Path]) -> Iterator[Engines]:
    with Engines(tiny_model, "cuda") as engines:
        yield engines


@dataclass
class Trace:
    kernels: Counter[str]
    copies: Counter[int]
    """This counts copies from the GPU to itself, by their bytes."""
    uploads: list[str]
    """This lists the names of copies from the host to the GPU."""


def traced(call: Callable[[], object], directory: Path) -> Trace:
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    recorded.export_chrome_trace(str(directory / "trace.json"))
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    kernels = Counter(event["name"] for event in events if event.get("cat") == "kernel")
    kernels.pop(OF_GRAPHS, None)
    products = [name for name in kernels if PRODUCTS.search(name)]
    kernels["products"] = sum(kernels.pop(name) for name in products)
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    return Trace(
        kernels,
        Counter(event["args"]["bytes"] for event in copies if "DtoD" in event["name"]),
        [event["name"] for event in copies if "HtoD" in event["name"]],
    )


def state_sizes(llm: LLM) -> set[int]:
    """Return the bytes of a block, and of each layer's recurrent state: alone, with its window, and with the gap."""
    sizes = {llm.runner.states.block_bytes}
    for layer in llm.runner.states.layers:
        parts = [tensor[0] for tensor in layer]
        end = parts[-1].data_ptr() + parts[-1].nbytes
        sizes |= {parts[-1].nbytes, sum(part.nbytes for part in parts), end - parts[0].data_ptr()}
    return sizes


@pytest.mark.parametrize("model", ["qwen3_next", "kimi_linear", "zamba2", "jamba"])
def test_no_copy_in_more_than_a_hundred_steps(engines: Engines, model: str, tmp_path: Path) -> None:
    """Hits, boundaries and commits run and copy nothing that the same requests with the cache off do not.

    A step is a single upload. Copies in both runs are of activations.
    """
    traces = []
    for cached in (True, False):
        llm = engines(model, enable_prefix_caching=cached, **OPTIONS)
        ask(llm, [tokens_of(9, 290)], ANSWER)
        outputs = []
        with patch.object(llm.runner, "launch", side_effect=llm.runner.launch) as steps:
            trace = traced(lambda llm=llm, outputs=outputs: outputs.extend(ask(llm, PROMPTS, ANSWER, False)), tmp_path)
        assert hits(outputs) == ([0, 256, 192, 192] if cached else [0] * 4)
        assert not trace.copies.keys() & state_sizes(llm)
        assert trace.uploads == ["Memcpy HtoD (Pinned -> Device)"] * steps.call_count and steps.call_count > 100
        traces.append(trace)
    engines.check()
    on, off = traces
    different = sorted(on.kernels.keys() ^ off.kernels.keys())
    assert len(on.kernels) > 1 and not different, "\n".join(different)
    assert on.kernels <= off.kernels and on.copies <= off.copies


def test_the_trace_sees_a_planted_copy(tmp_path: Path) -> None:
    pool = torch.zeros(4, 1 << 16, device="cuda")
    assert traced(lambda: pool[1].copy_(pool[2]), tmp_path).copies == Counter([pool[1].nbytes])
