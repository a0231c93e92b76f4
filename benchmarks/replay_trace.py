"""Replays a trace of requests through `PrefixCache`, and through simulators of other policies: which share of what
could be hit is hit.

    python benchmarks/replay_trace.py TRACE [--model qwen3-next] [--budgets 5+20 20+40 40+80] [--running 1]
        [--requests N] [--json OUT.json]

Budgets are GiB of states + GiB of KV. A trace is in Mooncake's format (see trace_tokens.py).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm
from trace_tokens import Request, requests

from mambacache import CacheConfig, Hit, PrefixCache

GIB = 1 << 30
BLOCK = 64
BUDGET = 8192  # tokens of a step
MODELS = {"qwen3-next": (77_266_944, 24_576), "nemotron-h-8b": (102_137_856, 16_384)}  # bytes: a state, a token's KV


@dataclass
class Row:
    """`share`: of the ceiling, 0 to 1; `host_ms` of one request."""

    trace: str
    model: str
    policy: str
    running: int
    state_gib: float
    kv_gib: float
    host_gib: float
    share: float
    states_stored: int
    host_ms: float


class Replay:
    """Requests through a cache, `running` at a time; each step decodes all and prefills one."""

    def __init__(self, cache: PrefixCache, running: int) -> None:
        self.cache = cache
        self.running = running
        self.hit_tokens = 0
        self.left: dict[str, list[int]] = {}  # answers, of those that run, last token first
        self.waiting: deque[tuple[str, list[int]]] = deque()

    def replay(self, trace: Iterator[Request]) -> None:
        number, more = 0, True
        while more or self.left or self.waiting:
            while more and len(self.left) + len(self.waiting) < self.running:
                request = next(trace, None)
                more = request is not None
                if request is not None:
                    name = str(number)
                    self.cache.add(name, request.prompt)
                    self.waiting.append((name, request.answer[::-1].tolist()))
                    number += 1
            self._admit()
            self._step()

    def _admit(self) -> None:
        for _ in range(len(self.waiting)):
            name, answer = self.waiting.popleft()
            found = self.cache.admit(name) if not self.cache.waits(name) else None
            if isinstance(found, Hit):
                self.left[name] = answer
                self.hit_tokens += found.num_tokens
            else:
                self.waiting.append((name, answer))

    def _step(self) -> None:
        """One step of every running request; a preempted one starts again behind the others."""
        cache, budget, steps = self.cache, BUDGET, []
        for name in list(self.left):
            if budget:
                row = cache.allocate(name, cache.chunk(name, budget))
                if row is None:
                    cache.preempt(name)
                    self.waiting.append((name, self.left.pop(name)))
                else:
                    budget -= row.num_tokens
                    steps.append(row)
        planned = cache.plan_rows(steps)
        cache.issued(planned)
        cache.accept(planned, {row.request_id: [self.left[row.request_id].pop()] for row in planned if row.samples})
        for row in planned:
            if not self.left[row.request_id]:
                del self.left[row.request_id]
                cache.free(row.request_id, finished=True)


def blocks(state_gib: float, kv_gib: float, model: str) -> tuple[int, int]:
    state, token = MODELS[model]
    return int(state_gib * GIB / state), int(kv_gib * GIB / (token * BLOCK))


def ours(trace: list[Request], running: int, num_states: int, num_pages: int) -> tuple[int, int, float]:
    """Tokens hit, states stored, milliseconds of a request."""
    cache = PrefixCache(CacheConfig(num_states, num_pages, accounting=False))
    replay, start = Replay(cache, running), time.perf_counter()
    replay.replay(iter(tqdm(trace, mininterval=5)))
    cache.check()
    return replay.hit_tokens, cache.stats.states_stored, 1e3 * (time.perf_counter() - start) / len(trace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--budgets", nargs="+", default=["5+20", "20+40", "40+80"])
    parser.add_argument("--running", type=int, default=1)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trace = list(requests(options.trace))[: options.requests]
    ceiling = sum(request.ceiling for request in trace)
    rows = []
    for budget in options.budgets:
        state_gib, kv_gib = map(float, budget.split("+"))
        hit, stored, host_ms = ours(trace, options.running, *blocks(state_gib, kv_gib, options.model))
        row = Row(
            options.trace.stem, options.model, "mambacache", options.running, state_gib, kv_gib, 0,
            hit / ceiling, stored, host_ms,
        )  # fmt: skip
        print(f"{budget:8} {row.policy:12} {row.share:.4f} of the ceiling, {host_ms:.1f} ms a request", flush=True)
        rows.append(asdict(row))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
