"""What a greedy decode step costs the host of our own engine, a step ahead of its tokens as on a GPU: the demo's model
gives the same logits in each step, which cost nothing. And how many operators a step asks torch for besides the model,
views and what finds the most likely token included. Needs no GPU:

    python benchmarks/bench_engine_host.py [--rows 1 64 256]

To set two versions against each other run each in turn, the other one with its folder in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mambacache import LLM, SamplingParams
from mambacache.demo import MODEL

PROMPT, TOKENS, VOCABULARY = 64, 129, 136  # of that model


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Loop:
    def __init__(self, rows: int) -> None:
        self.llm = LLM(str(MODEL), max_num_seqs=rows, max_num_batched_tokens=(PROMPT + 1) * rows)
        self.llm._step_loop.steps_ahead = 1
        self._logits, self._launch, self.operators = torch.randn(PROMPT * rows, VOCABULARY), self.llm.runner.launch, []
        self.llm.runner.model.logits = lambda indices, *_: self._logits[: len(indices.logits_index)]
        rng = random.Random(0)
        self._prompts = [[rng.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(rows)]

    def times(self) -> list[float]:
        """Of all steps that only decode, in ms."""
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        for prompt in self._prompts:
            self.llm.submit({"prompt_token_ids": prompt}, params)
        times = []
        while not self.llm.idle:
            start = time.perf_counter()
            self.llm.step()
            times.append(1e3 * (time.perf_counter() - start))
        return times[4:-4]

    def _counted(self, *args: Any) -> Any:
        with Counting() as counting:
            launched = self._launch(*args)
        self.operators.append(counting.count)
        return launched

    def count(self) -> int:
        self.llm.runner.launch = self._counted  # type: ignore[method-assign]
        self.times()
        return int(statistics.median(self.operators))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rows in options.rows:
        loop = Loop(rows)
        loop.times()
        times = sorted(loop.times())
        fifth, median = times[len(times) // 5], statistics.median(times)
        brief = f"a fifth of the steps takes up to {fifth:.2f} ms, the median {median:.2f}"
        print(f"{rows} rows: {brief}; {loop.count()} operators", flush=True)


if __name__ == "__main__":
    main()
