"""Times of GPU work in µs: replayed from a CUDA graph, called eagerly, and on the host alone."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Call = Callable[[], object]

GRAPH_US = 4000  # length of a captured graph, so that launching it costs nothing beside it


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
    """Median time from one call to the end of its work on the GPU, with the launches as an eager step pays them.

    The calls take turns, so that none finds its data in the L2 cache.
    """
    turns = itertools.cycle(calls)
    for call in calls:
        call()
    return _median_us(lambda: next(turns)(), repeats)


def graph_us(calls: Sequence[Call], repeats: int) -> float:
    """Median time of one call in a replayed graph that holds them in turns, back to back."""
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
    """Median time in which one call returns, its launches queued and nothing waited for."""
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
    """Bytes read and written per second by a copy of 2 GiB."""
    source = torch.ones(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (eager_us([lambda: target.copy_(source)], repeats) * 1e-6)


@contextmanager
def marked(owner: Any, method: str) -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Events on the current stream before and after each call of the method while this lasts, call by call: a step of
    an engine, in which the device waits for nothing once the host is ahead of it."""
    call, marks = getattr(owner, method), []

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call(*args, **kwargs)
        end.record()
        marks.append((begin, end))
        return result

    setattr(owner, method, timed)
    try:
        yield marks
    finally:
        setattr(owner, method, call)
        torch.cuda.synchronize()
