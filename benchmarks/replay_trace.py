"""Replay a trace through `PrefixCache` and simulators of other policies, and report the share of the ceiling hit.

    python benchmarks/replay_trace.py [benchmarks/traces/mooncake_conversation.jsonl.gz] [--agents N]
        [--model qwen3-next] [--budgets 5+20 20+40 20+40+200 60 unbounded] [--policies mambacache vllm] [--running 1]
        [--losses] [--requests N] [--after 1800] [--jobs 1] [--json OUT.json]

A budget is GiB of states + GiB of KV, or GiB of both together, which `split` divides for policies with two pools. A
third number is GiB of host memory, for mambacache only; a transfer takes a step. A trace has Mooncake's format (see
trace_tokens.py). Agents' traffic is generated (simulators/agents.py), and mixed with the trace by arrival if both are
given. Requests before `--after` only warm the cache. Simulators run one request after the other.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulators import POLICIES
from simulators.agents import Traffic, setting
from simulators.parts import BLOCK, GIB, Budget, Shape
from simulators.sglang import divided
from tqdm import tqdm
from trace_tokens import Request, requests

from mambacache import CacheConfig, Hit, PrefixCache
from mambacache.config import KV_TOKENS_PER_HOST_STATE, KV_TOKENS_PER_STATE
from mambacache.plan import Transfer
from mambacache.runner.kv_pages import slab_of

OURS = "mambacache"
STEP = 8192  # tokens
RECORD = 1 << 28  # tokens remembered by the cache's accounting, more than a trace has
UNBOUNDED = "unbounded"
SAMPLED = 100  # requests
STATES_OF_A_REQUEST = 8  # upper bound of the average
MODELS = {
    "qwen3-next": Shape(77_266_944, 24_576, 36, 12, 4096, 3_000_000_000),
    "qwen3-next-fp8-kv": Shape(77_266_944, 12_288, 36, 12, 4096, 3_000_000_000),
    "qwen3-next-bf16-states": Shape(39_518_208, 24_576, 36, 12, 4096, 3_000_000_000),
    "nemotron-h-8b": Shape(102_137_856, 16_384, 24, 4, 4096, 8_000_000_000),
}


@dataclass(frozen=True)
class Run:
    """Describes the measurement of a row; `budget` is the argument's text, `agents` a number of generated traffic."""

    trace: Path | None
    model: str
    policy: str
    budget: str
    running: int
    losses: bool
    requests: int | None
    agents: int | None = None
    after: float = 0.0  # seconds


@dataclass
class Row:
    """Holds a result; `host_ms` to `losses` are for mambacache only.

    Attributes:
        state_gib: None if unbounded.
        kv_gib: None if unbounded, 0 if states and KV share `state_gib`.
        share: Share of the ceiling that was hit, 0 to 1.
        host_ms: Host time of a request.
        unused: Mean share of the device's memory without a block, in the second half of the trace.
        states_stored: None without `--losses`.
        states_kept: at the end.
        losses: Share of the ceiling lost, by reason; None without `--losses`.
        after: Seconds of the trace that only warm the cache.
    """

    trace: str
    model: str
    policy: str
    running: int
    state_gib: float | None
    kv_gib: float | None
    host_gib: float
    share: float
    host_ms: float | None = None
    unused: float | None = None
    states_stored: int | None = None
    states_kept: int | None = None
    losses: dict[str, float] | None = None
    after: float = 0.0

    def place(self) -> tuple[str, str, str, int, float | None, float | None, float, float]:
        """Return the key of this row in a file."""
        return self.trace, self.model, self.policy, self.running, self.state_gib, self.kv_gib, self.host_gib, self.after


@dataclass
class Running:
    """Holds a request in the cache; `left` is the rest of its answer in reversed order."""

    name: str
    left: list[int]
    counted: bool


class Replay:
    """Runs requests through a cache, `running` at a time; each step decodes all and prefills some.

    Hits of requests that arrive before `after` are not counted.
    """

    def __init__(self, cache: PrefixCache, running: int, after: float = 0.0) -> None:
        self.cache = cache
        self._after = after
        self.hit_tokens = 0
        self._most = running
        self._running: dict[str, Running] = {}
        self._waiting: deque[Running] = deque()
        self._copied: tuple[Transfer, ...] = ()

    def replay(self, trace: Iterator[Request]) -> None:
        for number, request in enumerate(trace):
            while len(self._running) + len(self._waiting) == self._most:
                self._advance()
            self.cache.add(str(number), request.prompt)
            self._waiting.append(Running(str(number), request.answer[::-1].tolist(), request.arrival < self._after))
        while self._running or self._waiting:
            self._advance()

    def _advance(self) -> None:
        """Run a step, after the transfers begun with the last step have ended."""
        for transfer in self._copied:
            self.cache.transferred(transfer)
        self._admit()
        self._step()
        self._copied = self.cache.transfers()

    def _admit(self) -> None:
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            found = self.cache.admit(request.name) if not self.cache.waits(request.name) else None
            if not isinstance(found, Hit):
                self._waiting.append(request)
                continue
            self._running[request.name] = request
            if not request.counted:  # a preempted request hits its own blocks
                self.hit_tokens += found.num_tokens
                request.counted = True

    def _step(self) -> None:
        """Run a step of every running request; preempted requests wait again behind the others."""
        cache, budget, steps = self.cache, STEP, []
        for name in list(self._running):
            if not budget:
                break
            row = cache.allocate(name, cache.next_tokens(name, budget))
            if row is None:
                cache.preempt(name)
                self._waiting.append(self._running.pop(name))
            else:
                budget -= row.num_tokens
                steps.append(row)
        planned = cache.plan_rows(steps)
        cache.issued(planned)
        sampled = {row.request_id: [self._running[row.request_id].left.pop()] for row in planned if row.samples}
        cache.accept(planned, sampled)
        for name in sampled:
            if not self._running[name].left:
                del self._running[name]
                cache.free(name, finished=True)


def split(total: float, shape: Shape, tokens: int = KV_TOKENS_PER_STATE) -> Budget:
    """Divide a budget of bytes between two pools, a state for every `tokens` tokens of KV."""
    state = total * shape.state_bytes / (shape.state_bytes + tokens * shape.kv_bytes)
    return Budget(int(state), int(total - state))


def budget_of(text: str, shape: Shape, trace: Sequence[Request]) -> Budget:
    """Return the budget of the device."""
    if text == UNBOUNDED:
        tokens = sum(len(request.prompt) + len(request.answer) + BLOCK for request in trace)
        return Budget(STATES_OF_A_REQUEST * len(trace) * shape.state_bytes, tokens * shape.kv_bytes)
    state, kv, _ = gib_of(text)
    return Budget(int(state * GIB), int(kv * GIB)) if kv else split(state * GIB, shape)


def gib_of(text: str) -> tuple[float, float, float]:
    """Return GiB of states, KV and host memory, 0 if not given."""
    state, kv, host = [float(part) for part in f"{text}+0+0".split("+")[:3]]
    return state, kv, host


def blocks_of(run: Run, budget: Budget, shape: Shape) -> dict[str, Any]:
    """Return the pools of `CacheConfig`, with one memory for one budget."""
    page = shape.kv_bytes * BLOCK
    if run.budget == UNBOUNDED or gib_of(run.budget)[1]:
        return {"num_state_blocks": budget.state // shape.state_bytes, "num_kv_blocks": budget.kv // page}
    slab = slab_of(shape.state_bytes, page)
    num_slabs = budget.total // slab.nbytes - 1
    pages = (num_slabs - run.running - 2) * slab.pages
    return {"num_state_blocks": num_slabs * slab.states, "num_kv_blocks": pages, "slab": (slab.states, slab.pages)}


def load(run: Run) -> tuple[str, list[Request]]:
    """Return the name and the requests of a run's traffic, by arrival."""
    names, trace = list[str](), list[Request]()
    if run.trace is not None:
        names.append(run.trace.name.removesuffix(".gz").removesuffix(".jsonl"))
        trace += requests(run.trace)
    if run.agents is not None:
        names.append(f"agents-{run.agents}")
        trace += Traffic(setting(run.agents)).run()
        trace.sort(key=lambda request: request.arrival)
    return "+".join(names), trace[: run.requests]


def measure(run: Run) -> Row:
    """Return the row of a run.

    Raises:
        ValueError: the trace has nothing to hit, or the budget is too small to run a request.
    """
    name, trace = load(run)
    ceiling = sum(request.ceiling for request in trace if request.arrival >= run.after)
    if not ceiling:
        raise ValueError(f"no request of {name} shares a prefix with an earlier request: give another trace")
    shape = MODELS[run.model]
    budget = budget_of(run.budget, shape, trace)
    state_gib, kv_gib, host_gib = (None, None, 0.0) if run.budget == UNBOUNDED else gib_of(run.budget)
    row = Row(name, run.model, run.policy, run.running, state_gib, kv_gib, host_gib, 0.0, after=run.after)
    bar = tqdm(trace, f"{run.policy} {run.budget}", mininterval=2, leave=False)
    if run.policy == "sglang" and run.budget != UNBOUNDED and not kv_gib:
        budget = divided(budget.total)
    if run.policy != OURS:
        simulator = POLICIES[run.policy](shape, budget, trace)
        hits = [(request.arrival, simulator.request(request.prompt, request.answer)) for request in bar]
        row.share = sum(hit for arrival, hit in hits if arrival >= run.after) / ceiling
        return row
    page_bytes, host = shape.kv_bytes * BLOCK, split(host_gib * GIB, shape, KV_TOKENS_PER_HOST_STATE)
    cache = PrefixCache(
        CacheConfig(
            **blocks_of(run, budget, shape), accounting=run.losses, record_tokens=RECORD,
            num_host_states=host.state // shape.state_bytes, num_host_pages=host.kv // page_bytes,
            state_bytes=shape.state_bytes, page_bytes=page_bytes,
        )
    )  # fmt: skip
    unused: list[float] = []

    def watched() -> Iterator[Request]:
        for number, request in enumerate(bar):
            if number > len(trace) // 2 and number % SAMPLED == 0:
                states, pages = cache.stats.state_blocks, cache.stats.kv_blocks
                used = [blocks["writing"] + blocks["committed"] for blocks in (states, pages)]
                unused.append(1 - (used[0] * shape.state_bytes + used[1] * page_bytes) / budget.total)
            yield request

    replay, start = Replay(cache, run.running, run.after), time.perf_counter()
    replay.replay(watched())
    cache.check()
    row.share, row.host_ms = replay.hit_tokens / ceiling, 1e3 * (time.perf_counter() - start) / len(trace)
    row.unused = statistics.mean(unused) if unused else None
    row.states_kept = cache.stats.state_blocks["committed"]
    if run.losses:
        row.states_stored = cache.stats.states_stored
        row.losses = {str(reason): tokens / ceiling for reason, tokens in cache.stats.losses.items() if tokens}
    return row


def write(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file, and replace rows of the same runs."""
    old = [Row(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else []
    merged = {row.place(): row for row in [*old, *rows]}
    path.write_text(json.dumps({"rows": [asdict(row) for row in merged.values()]}, indent=1) + "\n")


def budget_text(text: str) -> str:
    if text != UNBOUNDED and not re.fullmatch(r"\d+(\.\d+)?(\+\d+(\.\d+)?){0,2}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a budget: give 20+40 (GiB of states and KV), 20+40+200, 60 or {UNBOUNDED}"
        )
    return text


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer: give an integer, 1 or more")
    return int(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument(
        "--agents", type=int, metavar="N", help="generated traffic: N is even for tuning, odd to report"
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-next")
    parser.add_argument("--budgets", nargs="+", type=budget_text, default=["5+20", "20+40", "40+80"])
    parser.add_argument("--policies", nargs="+", choices=[OURS, *POLICIES], default=[OURS, *POLICIES])
    parser.add_argument("--running", type=count, default=1, help="requests at a time; more than 1 for mambacache only")
    parser.add_argument("--losses", action="store_true", help="count stored states, and losses by reason; slower")
    parser.add_argument("--requests", type=count, help="number of requests, from the first; all by default")
    parser.add_argument("--after", type=float, default=0.0, help="seconds of the trace that only warm the cache")
    parser.add_argument("--jobs", type=count, default=1, help="rows measured in parallel, in separate processes")
    parser.add_argument("--json", type=Path, help="file to add or replace rows in")
    options = parser.parse_args()
    if options.trace is None and options.agents is None:
        parser.error("nothing to replay: give a trace, --agents N, or both")
    if any(budget.count("+") == 2 for budget in options.budgets) and options.policies != [OURS]:
        parser.error(f"only {OURS} has host memory, the third number of a budget: add --policies {OURS}")
    if options.running > 1 and options.policies != [OURS]:
        parser.error(f"simulators run one request after the other: add --policies {OURS}, or leave out --running")
    return options


def main() -> None:
    options = parse()
    rest = options.running, options.losses, options.requests, options.agents, options.after
    runs = [
        Run(options.trace, options.model, policy, budget, *rest)
        for policy in options.policies
        for budget in options.budgets
    ]
    with ProcessPoolExecutor(options.jobs) as processes:
        for done in as_completed([processes.submit(measure, run) for run in runs]):
            row = done.result()
            gib = UNBOUNDED if row.state_gib is None else f"{row.state_gib:g}+{row.kv_gib:g}+{row.host_gib:g}"
            host = f", {row.host_ms:.1f} ms a request" if row.host_ms is not None else ""
            tqdm.write(f"{row.model:14} {row.policy:12} {gib:11} {row.share:.4f} of the ceiling{host}")
            if options.json:
                write(options.json, [row])


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"replay_trace: {error}")
