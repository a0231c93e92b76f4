"""Another engine, with its own loop, KV and layers, gets from the cache what `LLM` gets."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest

from foreign_engine import ForeignEngine
from mambacache import LLM, SamplingParams
from selection import full
from tiny_models import save_tiny_model

SOURCE = Path(__file__).with_name("foreign_engine.py")
ANSWER = 70


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3_next", tmp_path_factory.mktemp("model"))


def rounds() -> list[list[list[int]]]:
    """Batches of prompts: a shared prefix met three times, an identical prompt, and one of its own."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, 100) for _ in range(count)]

    shared = tokens(200)
    first = shared + tokens(80)
    return [[first], [shared + tokens(90), tokens(50)], [shared + tokens(7), first], [first + tokens(1)]]


@pytest.mark.parametrize("budget", [64, *full(8192)])
def test_same_hits_and_tokens_as_llm(model: Path, budget: int) -> None:
    engine = ForeignEngine(str(model), budget)
    llm = LLM(model, device="cpu", max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    hits = []
    for number, prompts in enumerate(rounds()):
        jobs = engine.generate({f"{number}-{i}": prompt for i, prompt in enumerate(prompts)}, ANSWER)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for i, output in enumerate(outputs):
            job = jobs[f"{number}-{i}"]
            assert job.hit is not None and output.cache is not None
            assert job.hit.num_tokens == output.cache.hit
            assert job.answer == output.outputs[0].token_ids
            hits.append(job.hit.num_tokens)
    on_the_way = 192 if budget == 64 else 0  # steps that end on a boundary leave their state there
    assert hits == [0, on_the_way, 0, 192, 256, 256]


def test_it_imports_public_modules_alone() -> None:
    source = SOURCE.read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module}
    assert {name for name in imported if name.startswith("mambacache")} <= {
        "mambacache",
        "mambacache.plan",
        "mambacache.kernels",
    }
