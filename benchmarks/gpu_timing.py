"""Time GPU work in µs: in a CUDA graph, eagerly, or on the host alone."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

GRAPH_US = 4000  # length of a captured graph, long beside its launch


def _median_us(call: Call, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def eager_us(calls: Sequence[Call], repeats: int) -> float:
    """Return the median time from a call to the end of its work on the GPU, launches included.

    The calls take turns, so that no call finds its data in the L2 cache.
    """
    turns = itertools.cycle(calls)
    for call in calls:
        call()
    return _median_us(lambda: next(turns)(), repeats)


def graph_us(calls: Sequence[Call], repeats: int) -> float:
    """Return the median time of a call in a replayed graph of all calls, back to back."""
    count = max(GRAPH_US // int(eager_us(calls, 3)), 4)
    count = min(-(-count // len(calls)), 64) * len(calls)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            calls[i % len(calls)]()
    graph.replay()
    return _median_us(graph.replay, repeats) / count


def host_us(call: Call, repeats: int) -> float:
    """Return the median time until a call returns, with its kernels queued."""
    for _ in range(10):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def copy_bandwidth(repeats: int) -> float:
    """Return the bytes per second that a copy of 2 GiB reads and writes."""
    source = torch.ones(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (eager_us([lambda: target.copy_(source)], repeats) * 1e-6)
