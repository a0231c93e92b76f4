"""Host cost of planning: a step of decoding requests, and matching a long prompt.

    python benchmarks/bench_scheduler.py [--json OUT.json]

Needs no GPU and no model. Medians, in milliseconds, on one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig, SamplingParams
from mambacache.scheduler.request import Request
from mambacache.scheduler.scheduler import Scheduler

SCHEDULE_LIMIT_MS = 1.5  # 256 requests of 8,000 tokens
MATCH_LIMIT_MS = 3.0  # 100,000 tokens


def median_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def time_schedule(requests: int, tokens: int, steps: int = 200) -> float:
    """`schedule()`, planning and arrays included, of a step in which every request decodes one token."""
    blocks = requests * (tokens // 64 + 8)
    cache = PrefixCache(CacheConfig(num_state_blocks=2 * requests + 64, num_kv_blocks=blocks))
    scheduler = Scheduler(cache, max_num_batched_tokens=1 << 16, max_num_seqs=requests)
    rng = random.Random(0)
    for i in range(requests):
        prompt = [rng.randrange(1 << 15) for _ in range(tokens - i % 64)]  # boundaries fall into different steps
        scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=1 << 20)))
    times: list[float] = []
    while len(times) < steps:
        start = time.perf_counter()
        plan = scheduler.schedule()
        elapsed = (time.perf_counter() - start) * 1e3
        assert plan is not None
        if plan.num_decodes == requests:
            times.append(elapsed)
        scheduler.issued(plan)
        scheduler.update(plan, [[1] if step.samples else [] for step in plan.steps])
    return statistics.median(times)


def time_match(tokens: int, repeats: int = 50) -> float:
    """`match()` of a prompt that was computed before and whose hashes are known."""
    cache = PrefixCache(CacheConfig(num_state_blocks=64, num_kv_blocks=2 * tokens // 64))
    scheduler = Scheduler(cache, max_num_batched_tokens=tokens, max_num_seqs=1)
    prompt = [random.Random(0).randrange(1 << 15) for _ in range(tokens)]
    scheduler.add(Request("first", prompt, SamplingParams(max_tokens=1)))
    while (plan := scheduler.schedule()) is not None:
        scheduler.issued(plan)
        scheduler.update(plan, [[1] if step.samples else [] for step in plan.steps])
    cache.add("again", prompt)
    assert cache.match("again").num_tokens == (tokens - 1) // 64 * 64
    return median_ms(lambda: cache.match("again"), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    cases: list[tuple[str, Callable[[], float], float | None]] = [
        ("schedule, 64 x 8,000 tokens", lambda: time_schedule(64, 8000), None),
        ("schedule, 128 x 8,000 tokens", lambda: time_schedule(128, 8000), None),
        ("schedule, 256 x 8,000 tokens", lambda: time_schedule(256, 8000), SCHEDULE_LIMIT_MS),
        ("match, 25,000 tokens", lambda: time_match(25_000), None),
        ("match, 50,000 tokens", lambda: time_match(50_000), None),
        ("match, 100,000 tokens", lambda: time_match(100_000), MATCH_LIMIT_MS),
    ]
    rows = [
        {"case": name, "median_ms": round(run(), 3), "limit_ms": limit} for name, run, limit in tqdm(cases, leave=False)
    ]
    for row in rows:
        print(
            f"{row['case']:<30} {row['median_ms']:>8} ms" + (f"  (limit {row['limit_ms']})" if row["limit_ms"] else "")
        )
    if args.json:
        args.json.write_text(
            json.dumps({"machine": platform.processor() or platform.machine(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
