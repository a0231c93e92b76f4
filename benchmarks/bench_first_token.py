"""Time to the first token against the length of the hit: the demo's trained model on this machine.

    python benchmarks/bench_first_token.py [--json OUT.json] [--rounds 5]

A prompt of 4,096 tokens, of which 0 to 4,032 were computed by a prompt before it; the cache forgets all in between.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
from pathlib import Path

import torch
from about import about
from tqdm import tqdm

from mambacache import LLM, SamplingParams
from mambacache.demo import MODEL

PROMPT, STEP = 4096, 512
VOCABULARY = 130
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_token(llm: LLM, rng: random.Random, shared: int) -> float:
    """Seconds, of a prompt that shares so many tokens with the one before."""

    def tokens(count: int) -> list[int]:
        return rng.choices(range(3, VOCABULARY), k=count)

    llm.reset_prefix_cache()
    prompt = tokens(PROMPT)
    if shared:
        marked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, checkpoint_at=[shared])
        llm.generate([prompt[:shared] + tokens(64)], marked, use_tqdm=False)
    output = llm.generate([prompt], PARAMS, use_tqdm=False)[0]
    assert output.cache is not None and output.cache.hit == shared and output.time_to_first_token is not None
    return output.time_to_first_token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    llm, rng = LLM(MODEL, max_num_batched_tokens=2048), random.Random(0)
    hits = [*range(0, PROMPT, STEP), PROMPT - 64]
    first_token(llm, rng, 0)
    times: dict[int, list[float]] = {hit: [] for hit in hits}
    for hit in tqdm([hit for _ in range(arguments.rounds) for hit in hits]):
        times[hit].append(first_token(llm, rng, hit))
    rows = [{"hit_tokens": hit, "seconds": statistics.median(times[hit]), "times": times[hit]} for hit in hits]
    for row in rows:
        print(f"hit {row['hit_tokens']:5}  first token after {1e3 * row['seconds']:6.1f} ms")
    if arguments.json:
        machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "device": str(llm.config.device)}
        figures = about("torch", "transformers") | machine | {"prompt_tokens": PROMPT, "rows": rows}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
