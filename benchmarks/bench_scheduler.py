"""Time planning on the host: decode steps, matching, admission, waiting and aborts.

    python benchmarks/bench_scheduler.py [--json OUT.json]

It needs no GPU and no model. Times are medians in milliseconds on one core. An exponent of 1 means linear growth. To
compare two machines, divide by the calibration, the time of a fixed Python loop.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig, SamplingParams
from mambacache.plan import StepPlan
from mambacache.scheduler.request import Request
from mambacache.scheduler.scheduler import Scheduler

VOCAB = 1 << 15
NEW_TOKENS = 1000  # length of an admitted prompt

Choose = Callable[[list[float]], float]
"""Chooses among times: the median, or the minimum on a shared machine."""


class Case(NamedTuple):
    """Describes a measurement at several numbers.

    `limits` holds a maximum for each number in ms, `most_growth` the maximum of last time / first time.
    """

    name: str
    unit: str
    numbers: tuple[int, ...]
    time: Callable[[int], float]
    limits: tuple[float | None, ...]
    most_growth: float | None = None


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection, as an engine does with its weights and tables."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def elapsed_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def calibrate(repeats: int = 5) -> float:
    """Return the milliseconds of a million turns of a plain loop."""

    def loop() -> None:
        value, seen = 1, {}
        for i in range(1_000_000):
            value = (value * 1103515245 + 12345) & 0x7FFFFFFF
            seen[i & 1023] = value

    return min(elapsed_ms(loop) for _ in range(repeats))


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return rng.choices(range(VOCAB), k=tokens)


def finish(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.issued(plan)
    scheduler.update(plan, [[1] if step.samples else [] for step in plan.steps])


def run_until_decoding(scheduler: Scheduler, requests: int) -> None:
    """Run steps until `requests` requests decode at once."""
    while (plan := scheduler.schedule()) is not None:
        finish(scheduler, plan)
        if plan.num_decodes == requests:
            return


def schedule_and_keep(scheduler: Scheduler) -> tuple[float, StepPlan]:
    """Return the milliseconds of `schedule()`, and its plan."""
    plans: list[StepPlan | None] = []
    elapsed = elapsed_ms(lambda: plans.append(scheduler.schedule()))
    assert plans[0] is not None
    return elapsed, plans[0]


# --- what is timed ---


def time_schedule(requests: int, tokens: int = 8000, steps: int = 200) -> float:
    """Time `schedule()`, arrays included, with one decode token for every request."""
    blocks = requests * (tokens // 64 + 8)
    cache = PrefixCache(CacheConfig(num_state_blocks=2 * requests + 64, num_kv_blocks=blocks))
    scheduler = Scheduler(cache, max_num_batched_tokens=1 << 16, max_num_seqs=requests)
    rng = random.Random(0)
    for i in range(requests):
        prompt = prompt_of(rng, tokens - i % 64)  # spreads block boundaries over steps
        scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=512)))
    run_until_decoding(scheduler, requests)
    times: list[float] = []
    with frozen():
        for _ in range(steps):
            elapsed, plan = schedule_and_keep(scheduler)
            assert plan.num_decodes == requests
            times.append(elapsed)
            finish(scheduler, plan)
    return statistics.median(times)


def time_match(tokens: int, repeats: int = 50) -> float:
    """Time `match()` of a computed prompt with known hashes."""
    cache = PrefixCache(CacheConfig(num_state_blocks=64, num_kv_blocks=2 * tokens // 64))
    scheduler = Scheduler(cache, max_num_batched_tokens=tokens, max_num_seqs=1)
    prompt = prompt_of(random.Random(0), tokens)
    scheduler.add(Request("first", prompt, SamplingParams(max_tokens=1)))
    run_until_decoding(scheduler, 1)
    cache.add("again", prompt)
    assert cache.match("again").num_tokens == (tokens - 1) // 64 * 64
    return statistics.median(elapsed_ms(lambda: cache.match("again")) for _ in range(repeats))


def time_admission(requests: int, shared: int = 0, repeats: int = 5, choose: Choose = statistics.median) -> float:
    """Time a `schedule()` that admits `requests` new prompts, with a cached state behind `shared` tokens."""
    rng = random.Random(0)
    stem = prompt_of(rng, shared)
    prompts = [stem + prompt_of(rng, NEW_TOKENS - shared) for _ in range(requests)]
    times = []
    for _ in range(repeats):
        cache = PrefixCache(CacheConfig(num_state_blocks=2 * requests + 64, num_kv_blocks=17 * requests + 64))
        scheduler = Scheduler(cache, max_num_batched_tokens=NEW_TOKENS * requests, max_num_seqs=requests)
        if shared:
            first = Request("first", [*stem, 0], SamplingParams(max_tokens=1))
            scheduler.add(first)
            run_until_decoding(scheduler, 1)
        for i, prompt in enumerate(prompts):
            scheduler.add(Request(str(i), prompt, SamplingParams()))
        with frozen():
            elapsed, plan = schedule_and_keep(scheduler)
        assert [step.start for step in plan.steps] == [shared] * requests
        times.append(elapsed)
    return choose(times)


def time_sharing(requests: int) -> float:
    """Run `time_admission` with hits of half the tokens."""
    return time_admission(requests, shared=512)


def time_mixed(new: int, decoding: int = 256, repeats: int = 15, choose: Choose = statistics.median) -> float:
    """Time a `schedule()` that admits new prompts beside decoding requests."""
    everybody = decoding + new
    cache = PrefixCache(CacheConfig(num_state_blocks=4 * everybody, num_kv_blocks=40 * everybody))
    scheduler = Scheduler(cache, max_num_batched_tokens=1 << 17, max_num_seqs=everybody)
    rng = random.Random(0)
    for i in range(decoding):
        scheduler.add(Request(str(i), prompt_of(rng, NEW_TOKENS - i % 64), SamplingParams(max_tokens=1 << 10)))
    run_until_decoding(scheduler, decoding)
    times = []
    for _ in range(repeats):
        for i in range(new):
            scheduler.add(Request(f"new {i}", prompt_of(rng, NEW_TOKENS), SamplingParams(max_tokens=2)))
        with frozen():
            elapsed, plan = schedule_and_keep(scheduler)
        assert (plan.num_decodes, len(plan.steps)) == (decoding, everybody)
        times.append(elapsed)
        finish(scheduler, plan)
        for i in range(new):
            scheduler.abort(f"new {i}")
    return choose(times)


def time_waiting(waiting: int, steps: int = 22) -> float:
    """Time a `schedule()` that computes 64 tokens of a prompt, while `waiting` requests wait for its prefix."""
    cache = PrefixCache(CacheConfig(num_state_blocks=64, num_kv_blocks=64))
    scheduler = Scheduler(cache, max_num_batched_tokens=200, max_num_seqs=16, long_prefill_token_threshold=64)
    prompt = prompt_of(random.Random(0), 64 * (steps + 2))
    for i in range(1 + waiting):
        scheduler.add(Request(str(i), prompt, SamplingParams()))
    finish(scheduler, schedule_and_keep(scheduler)[1])  # looks up all waiting requests
    assert cache.stats.waits == waiting
    times = []
    with frozen():
        for _ in range(steps):
            elapsed, plan = schedule_and_keep(scheduler)
            assert [step.request_id for step in plan.steps] == ["0"]
            times.append(elapsed)
            finish(scheduler, plan)
    return statistics.median(times)


def time_aborts(waiting: int) -> float:
    """Time the abort of `waiting` requests behind a running request, newest first."""
    cache = PrefixCache(CacheConfig(num_state_blocks=64, num_kv_blocks=64))
    scheduler = Scheduler(cache, max_num_batched_tokens=64, max_num_seqs=1)
    prompt = prompt_of(random.Random(0), 20)
    for i in range(1 + waiting):
        scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=2)))
    finish(scheduler, schedule_and_keep(scheduler)[1])

    def abort_all() -> None:
        for i in range(waiting, 0, -1):
            scheduler.abort(str(i))

    with frozen():
        elapsed = elapsed_ms(abort_all)
    assert set(scheduler.requests) == {"0"}
    return elapsed


# --- the table ---

CASES = [
    Case("schedule, all decode after 8,000 tokens", "requests", (64, 128, 256), time_schedule, (None, None, 1.0)),
    Case("match", "tokens", (25_000, 50_000, 100_000), time_match, (None, None, 3.0)),
    Case("admission, unrelated prompts", "prompts", (1024, 2048), time_admission, (60.0, None), 2.5),
    Case("admission, 512 tokens shared", "prompts", (1024, 2048), time_sharing, (60.0, None), 2.5),
    Case("admission beside 256 that decode", "prompts", (64,), time_mixed, (7.0,)),
    Case("schedule, while others wait for its prefix", "waiting", (0, 10_000), time_waiting, (None, None)),
    Case("aborting all that wait", "waiting", (8000, 32_000), time_aborts, (None, None)),
]


def measure(case: Case) -> dict[str, Any]:
    """Return a case's times and their growth."""
    times = [case.time(number) for number in case.numbers]
    row: dict[str, Any] = {"case": case.name, "unit": case.unit, "times": []}
    for number, ms, limit in zip(case.numbers, times, case.limits, strict=True):
        row["times"].append({"number": number, "median_ms": round(ms, 3), "limit_ms": limit})
    if len(times) > 1 and case.numbers[0]:
        growth = times[-1] / times[0]
        row["exponent"] = round(math.log(growth) / math.log(case.numbers[-1] / case.numbers[0]), 3)
        row |= {"growth": round(growth, 3), "most_growth": case.most_growth}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    calibration = round(calibrate(), 1)
    rows = [measure(case) for case in tqdm(CASES, leave=False)]
    print(f"calibration: {calibration} ms for a million turns of a plain loop")
    for row in rows:
        for each in row["times"]:
            limit = f"  (limit {each['limit_ms']})" if each["limit_ms"] else ""
            print(f"{row['case']:<44}{each['number']:>8,} {row['unit']:<9}{each['median_ms']:>10.3f} ms{limit}")
        if "exponent" in row:
            limit = f", limit {row['most_growth']}" if row["most_growth"] else ""
            print(f"{'':<44}exponent {row['exponent']} (grows {row['growth']} times{limit})")
    if args.json:
        machine = platform.processor() or platform.machine()
        args.json.write_text(json.dumps({"machine": machine, "calibration_ms": calibration, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
