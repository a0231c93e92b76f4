"""Time in which the tokens of a step are sampled, by what requests ask for: on the GPU, or on one core without one.

    python benchmarks/bench_sampling.py [--rows 1 16 256] [--vocabulary 151936]

Logits are normal and three times as wide, in bf16.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from gpu_timing import eager_us

from mambacache import SamplingParams
from mambacache.runner.sampler import draw_groups, draw_parameters, likeliest_tokens, sample

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature alone": SamplingParams(),
    "min_p": SamplingParams(min_p=0.1),
    "top_k 20, top_p 0.8": SamplingParams(top_k=20, top_p=0.8),
    "top_p 0.9 alone": SamplingParams(top_p=0.9),
}


def milliseconds(params: SamplingParams, rows: int, vocabulary: int, device: str, repeats: int = 10) -> float:
    """The median of one call."""
    logits = (3 * torch.randn(rows, vocabulary, device=device)).bfloat16()
    drawn = [params] * rows if params.temperature else []
    every = torch.arange(rows, dtype=torch.int32, device=device)
    parameters = torch.from_numpy(draw_parameters(drawn, range(len(drawn)), range(len(drawn)))).to(device)
    draws = every[: len(drawn)], parameters, draw_groups(drawn)

    def call() -> None:
        sample(logits, likeliest_tokens(logits), every, *draws)

    if device == "cuda":
        return eager_us([call], repeats) / 1e3
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--vocabulary", type=int, default=151936)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("ms".ljust(22), *(f"{rows:>4} rows" for rows in options.rows))
    for name, params in KINDS.items():
        cells = (milliseconds(params, rows, options.vocabulary, device) for rows in options.rows)
        print(name.ljust(22), *(f"{cell:9.2f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
