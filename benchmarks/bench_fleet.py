"""Route a trace over simulated replicas: round robin, by chat, by cached pages, and by pages and states.

    python benchmarks/bench_fleet.py benchmarks/traces/mooncake_conversation.jsonl.gz [--requests 3000]
        [--replicas 1 2 4 8] [--jobs 2] [--json OUT.json]

Each replica is a `PrefixCache` with room for 20 GiB of states and 40 GiB of KV. Its steps take as long as the plugin's
steps of Qwen3.5-9B on an H100 (results/vllm-qwen3.5-9b-h100.json). Requests come half as often for each replica as in
the trace. The router reads each replica's events after each step. It sends a request where the fewest tokens are left
before the answer: all of the request that is not expected to be hit, and of earlier requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from simulators.parts import BLOCK, GIB, prefixes
from table import ROUTINGS
from trace_tokens import Request, requests

from mambacache import CacheConfig, Hit, PrefixCache

MEASURED = Path(__file__).parent / "results" / "vllm-qwen3.5-9b-h100.json"
STATE_BYTES, PAGE_BYTES = 51_511_296, 32_768 * BLOCK  # of Qwen3.5-9B: 24 recurrent layers in fp32, 8 with attention
STATES, PAGES = 20 * GIB // STATE_BYTES, 40 * GIB // PAGE_BYTES
STEP, RUNNING = 8192, 64  # most tokens of a step, and requests
SLOWER = 2.0  # at the trace's own rate a replica has more to compute than it can


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: `step + row * decoding rows + token * prefill tokens`."""

    step: float
    row: float
    token: float

    @classmethod
    def measured(cls) -> Cost:
        rows = json.loads(MEASURED.read_text())["rows"]
        seconds = {row["workload"]: row["seconds"] for row in rows if row["engine"] == "plugin"}
        token = seconds["cold, 16 x 4096"] / (16 * 4096)
        alone, many = ((seconds[f"decode {count} x 256 after 512"] - count * 512 * token) / 256 for count in (1, 64))
        row = (many - alone) / 63
        return cls(alone - row, row, token)


@dataclass(eq=False)
class Sent:
    """Holds a request on a replica; `left` is the rest of its answer in reversed order."""

    name: str
    prefixes: np.ndarray  # a number for each prefix of prompt and answer
    left: list[int]
    arrival: float
    expected: dict[str, int]  # hit, by kind of routing
    work: int
    hit: int | None = None
    first_token: float | None = None


@dataclass
class Row:
    """Holds a result; times are seconds to the first token.

    Attributes:
        wrong: requests with another hit than expected, by the blocks that the router follows.
    """

    replicas: int
    routing: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    wrong: dict[str, int]
    mean: float
    median: float
    p99: float


@dataclass(eq=False)
class Replica:
    """Runs requests on a clock of its own. `held` says what its events told of: by kind, the prefixes of blocks."""

    cost: Cost
    clock: float = 0.0
    work: int = 0  # tokens of requests without a first token
    waiting: deque[Sent] = field(default_factory=deque)
    running: dict[str, Sent] = field(default_factory=dict)
    held: dict[str, set[int]] = field(default_factory=lambda: {"kv": set(), "state": set()})

    def __post_init__(self) -> None:
        self.cache = PrefixCache(CacheConfig(num_state_blocks=STATES, num_kv_blocks=PAGES, accounting=True))
        self._names: dict[tuple[str, bytes], int] = {}
        self._known: dict[str, Sent] = {}

    def expected(self, prompt: np.ndarray) -> dict[str, int]:
        """Return the hit by pages, and the hit by pages and states."""
        pages = states = 0
        for end in range(BLOCK, len(prompt), BLOCK):
            if int(prompt[end - 1]) not in self.held["kv"]:
                break
            pages = end
            states = end if int(prompt[end - 1]) in self.held["state"] else states
        return {"pages": pages, "pages and states": states}

    def send(self, sent: Sent, request: Request) -> None:
        self.cache.add(sent.name, request.prompt)
        self.clock = max(self.clock, sent.arrival)
        self._known[sent.name] = sent
        self.waiting.append(sent)
        self.work += sent.work

    def run(self, until: float) -> None:
        while (self.running or self.waiting) and self.clock < until:
            self._admit()
            self._step()
            self._follow()

    def _admit(self) -> None:
        for _ in range(len(self.waiting)):
            sent = self.waiting.popleft()
            room = len(self.running) < RUNNING and not self.cache.waits(sent.name)
            found = self.cache.admit(sent.name) if room else None
            if not isinstance(found, Hit):
                self.waiting.append(sent)
                continue
            self.running[sent.name] = sent
            if sent.hit is None:  # a preempted request hits its own blocks
                sent.hit = found.num_tokens

    def _step(self) -> None:
        cache, budget, steps = self.cache, STEP, []
        for name in [*self.running]:
            if not budget:
                break
            row = cache.allocate(name, cache.next_tokens(name, budget))
            if row is None:
                cache.preempt(name)
                self.waiting.append(self.running.pop(name))
            else:
                budget -= row.num_tokens
                steps.append(row)
        rows = cache.plan_rows(steps)
        cache.issued(rows)
        prefill = sum(row.num_tokens for row in rows if row.prefill)
        decoding = sum(not row.prefill for row in rows)
        self.clock += self.cost.step + self.cost.row * decoding + self.cost.token * prefill
        sampled = {row.request_id: [self.running[row.request_id].left.pop()] for row in rows if row.samples}
        cache.accept(rows, sampled)
        for name in sampled:
            sent = self.running[name]
            if sent.first_token is None:
                sent.first_token = self.clock - sent.arrival
                self.work -= sent.work
            if not sent.left:
                del self.running[name]
                cache.free(name, finished=True)

    def _follow(self) -> None:
        for event in self.cache.take_events():
            if event.action == "removed":
                self.held[event.kind].discard(self._names.pop((event.kind, event.block_hash)))
            else:
                name = int(self._known[event.request_id].prefixes[event.num_tokens - 1])
                self._names[event.kind, event.block_hash] = name
                self.held[event.kind].add(name)
        self._known = {name: sent for name, sent in self._known.items() if sent.left or name in self.running}


def choose(routing: str, number: int, request: Request, expected: list[dict[str, int]], fleet: list[Replica]) -> int:
    if routing == "round robin":
        return number % len(fleet)
    if routing == "by chat":
        return hash((request.chat,)) % len(fleet)
    left = [len(request.prompt) - each[routing] + replica.work for each, replica in zip(expected, fleet, strict=True)]
    return left.index(min(left))


def measure(trace: Path, count: int, replicas: int, routing: str) -> Row:
    fleet = [Replica(Cost.measured()) for _ in range(replicas)]
    everything: list[Sent] = []
    prompt_tokens = 0
    for number, request in enumerate(requests(trace)):
        if number == count:
            break
        arrival = SLOWER * request.arrival / replicas
        for replica in fleet:
            replica.run(arrival)
        names = prefixes(np.concatenate([request.prompt, request.answer]))
        prompt = names[: len(request.prompt)]
        expected = [replica.expected(prompt) for replica in fleet]
        best = choose(routing, number, request, expected, fleet)
        known = expected[best].get(routing, 0)
        answer = request.answer[::-1].tolist()
        sent = Sent(str(number), names, answer, arrival, expected[best], len(prompt) - known)
        fleet[best].send(sent, request)
        everything.append(sent)
        prompt_tokens += len(prompt)
    for replica in fleet:
        replica.run(float("inf"))
        replica.cache.check()
    times = [sent.first_token for sent in everything if sent.first_token is not None]
    hits = [sent.hit or 0 for sent in everything]
    wrong = {
        kind: sum(sent.expected[kind] != hit for sent, hit in zip(everything, hits, strict=True))
        for kind in ("pages", "pages and states")
    }
    mean, median, p99 = statistics.mean(times), statistics.median(times), statistics.quantiles(times, n=100)[98]
    return Row(replicas, routing, len(everything), prompt_tokens, sum(hits), wrong, mean, median, p99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000, help="number of requests, from the first")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel, in separate processes")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    runs = [(replicas, routing) for replicas in options.replicas for routing in ROUTINGS[: 4 if replicas > 1 else 1]]
    rows = []
    with ProcessPoolExecutor(options.jobs) as processes:
        jobs = [processes.submit(measure, options.trace, options.requests, *run) for run in runs]
        for job in as_completed(jobs):
            row = job.result()
            rows.append(row)
            print(row, flush=True)
            if options.json:
                done = sorted(map(asdict, rows), key=lambda row: (row["replicas"], ROUTINGS.index(row["routing"])))
                cost = asdict(Cost.measured())
                options.json.write_text(json.dumps({"cost": cost, "rows": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
