"""Time transfers of the tier in host memory, hits in it, and decoding beside transfers.

    python benchmarks/bench_host_tier.py MODEL [--device cuda] [--tokens 11000] [--rows 32] [--json OUT.json]

A transfer as large as the hit is timed with `copy_blocks` and as one plain copy, the speed of the bus. A hit in host
memory may take longer than the same hit on the device by at most 1.3 plain copies. Decode steps with and without
transfers alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import torch
from about import about

from mambacache import LLM, SamplingParams
from mambacache.plan import Transfer
from mambacache.runner.host_tier import HostTier

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
REPEATS = 5


@dataclass
class Row:
    """Holds median times in milliseconds; `slowed` is the relative slowdown of decoding beside transfers."""

    model: str
    device: str
    tokens: int
    num_bytes: int
    to_host_ms: float
    from_host_ms: float
    plain_ms: float
    device_hit_ms: float
    host_hit_ms: float
    decode_ms: float
    decode_beside_ms: float

    @property
    def slowed(self) -> float:
        return self.decode_beside_ms / self.decode_ms - 1

    @property
    def hit_over_plain(self) -> float:
        return (self.host_hit_ms - self.device_hit_ms) / self.plain_ms


def median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def prompt_of(seed: int, count: int, vocab_size: int) -> list[int]:
    return torch.randint(2, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def transfer_of(tokens: int, block_size: int, to_host: bool, number: int, first: int = 1) -> Transfer:
    """Return a transfer of a state and the KV of `tokens` tokens."""
    pages = tuple((block, block) for block in range(first, first + tokens // block_size))
    return Transfer(number, to_host, ((first, 1),), pages)


def move(tier: HostTier, transfer: Transfer) -> None:
    tier.launch([transfer])
    tier.wait()
    tier.forget(tier.ended())


def transfer_times(llm: LLM, tokens: int) -> tuple[int, float, float, float]:
    """Return the bytes, and the times to the host, from the host, and of a plain copy."""
    pools, size = [pool for pool in (llm.runner.states, llm.runner.pages) if pool is not None], llm.config.block_size
    pages = tokens // size if len(pools) > 1 else 0
    tier = HostTier(pools, (1, pages)[: len(pools)])
    times = [
        median_ms(lambda to_host=to_host: move(tier, transfer_of(pages * size, size, to_host, 1)))  # type: ignore[misc]
        for to_host in (True, False)
    ]
    tier.close()
    num_bytes = pools[0].block_bytes + pages * (pools[1].block_bytes if pages else 0)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    there = torch.empty_like(host, device=pools[0].buffer.device)
    return num_bytes, *times, median_ms(lambda: there.copy_(host, non_blocking=True))


def hit_times(llm: LLM, tokens: int) -> tuple[float, float]:
    """Return the times of a hit on the device and of a hit in host memory, on an idle engine."""
    vocab_size = llm.runner.model.config.vocab_size
    seeds = count()
    times: tuple[list[float], list[float]] = [], []
    for _ in range(REPEATS):
        for from_host in (False, True):
            prompt = prompt_of(next(seeds), tokens, vocab_size)  # a new prompt, since a hit delays eviction
            llm.generate(prompt, ONE, use_tqdm=False)
            while from_host and on_device(llm, prompt):
                llm.generate(prompt_of(next(seeds), tokens, vocab_size), ONE, use_tqdm=False)
            start = time.perf_counter()
            output = llm.generate(prompt, ONE, use_tqdm=False)[0]
            times[from_host].append(1e3 * (time.perf_counter() - start))
            assert output.cache is not None and (output.cache.from_host > 0) == from_host, output.cache
    return statistics.median(times[False]), statistics.median(times[True])


def on_device(llm: LLM, prompt: list[int]) -> bool:
    llm.cache.add("probe", prompt)
    hit = llm.cache.match("probe").num_tokens
    llm.cache.free("probe", finished=False)
    return hit > 0


def decode_times(llm: LLM, rows: int, steps: int, tokens: int) -> tuple[float, float]:
    """Return the times of a decode step alone and beside a transfer."""
    vocab_size, size = llm.runner.model.config.vocab_size, llm.config.block_size
    for row in range(rows):
        llm.submit(prompt_of(1000 + row, 64, vocab_size), SamplingParams(max_tokens=2 * steps + 40, ignore_eos=True))
    for _ in range(20):
        llm.step()
    pools = [pool for pool in (llm.runner.states, llm.runner.pages) if pool is not None]
    pages = tokens // size if len(pools) > 1 else 0
    tier = HostTier(pools, (1, pages)[: len(pools)])
    alone, beside = [], []
    for number in range(steps):
        for times, moving in ((alone, False), (beside, True)):
            if moving:  # to the host only, so that the engine's blocks stay unchanged
                tier.launch([transfer_of(pages * size, size, True, number)])
            start = time.perf_counter()
            llm.step()
            times.append(1e3 * (time.perf_counter() - start))
            if moving:
                tier.wait()
                tier.forget(tier.ended())
    while not llm.idle:
        llm.step()
    tier.close()
    return statistics.median(alone), statistics.median(beside)


def measure(model: str, device: str, tokens: int, rows: int, steps: int, **options: int) -> Row:
    with LLM(model, device=device, max_num_seqs=rows, **options) as llm:  # type: ignore[arg-type]
        num_bytes, *moved = transfer_times(llm, tokens)
        return Row(
            model, device, tokens, num_bytes, *moved, *hit_times(llm, tokens), *decode_times(llm, rows, steps, tokens)
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=11_000)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint-budget-bytes", type=int, default=1 << 30)
    parser.add_argument("--kv-cache-bytes", type=int, default=2 << 30)
    parser.add_argument("--host-cache-bytes", type=int, default=32 << 30)
    parser.add_argument("--json", type=Path)
    options = vars(parser.parse_args(argv))
    target = options.pop("json")
    row = measure(**options)
    rates = [row.num_bytes / ms / 1e6 for ms in (row.to_host_ms, row.from_host_ms, row.plain_ms)]
    print(
        f"{row.num_bytes:,} bytes: {rates[0]:.1f} GB/s to the host, {rates[1]:.1f} back, {rates[2]:.1f} in a plain copy"
    )
    print(
        f"a hit of {row.tokens:,} tokens: {row.device_hit_ms:.2f} ms on the device, {row.host_hit_ms:.2f} ms from the "
        f"host, {row.hit_over_plain:.2f} of the plain copy more"
    )
    print(
        f"a step of {options['rows']} decode rows: {row.decode_ms:.2f} ms, slowed by {row.slowed:.1%} beside transfers"
    )
    if target:
        target.write_text(json.dumps(about("torch", "triton") | {"rows": [asdict(row)]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
