"""Under constant eviction and refilling every request gets the tokens of the original."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine_driver import Engines, Original, ask, greedy, hits, tokens_of

Originals = Callable[[str], Original]

CYCLES = 34  # with each of three budgets


@pytest.mark.full
@pytest.mark.parametrize("model", ["mamba", "zamba2", "kimi_linear"])
@pytest.mark.parametrize("num_checkpoints", [0, 2, 1])
def test_evict_and_refill(engine: Engines, original: Originals, model: str, num_checkpoints: int) -> None:
    """Two prefixes want a checkpoint each, with room for both, for one or for none: batches of one to three requests
    of different lengths share blocks, evict one another's and compute them again."""
    rng = random.Random(num_checkpoints)
    prefixes = [tokens_of(seed, 130) for seed in range(2)]
    prompts = [prefix + tokens_of(10 + i, length) for prefix in prefixes for i, length in enumerate((1, 7, 40))]
    llm = engine(model, num_checkpoints=num_checkpoints, num_kv_blocks=9, max_num_batched_tokens=200)
    found = []
    for _ in range(CYCLES):
        chosen = rng.sample(range(len(prompts)), rng.randint(1, 3))
        outputs = ask(llm, [prompts[i] for i in chosen], greedy(2))
        original(model).check_all([prompts[i] for i in chosen], outputs)
        found += hits(outputs)
    assert set(found) == ({0, 128} if num_checkpoints else {0})


@pytest.mark.full
@pytest.mark.parametrize("model", ["mamba", "zamba2", "kimi_linear"])
def test_full_hits_on_every_boundary(engine: Engines, original: Originals, model: str) -> None:
    prompt = tokens_of(0, 330)
    llm = engine(model, checkpoint_interval=64)
    llm.generate(prompt, greedy(1), use_tqdm=False)
    lengths = range(65, 331, 64)
    parts = [prompt[:length] for length in lengths]
    outputs = ask(llm, parts, greedy(2))
    assert hits(outputs) == [64, 128, 192, 256, 320]
    original(model).check_all(parts, outputs)
