"""States and KV pages of an engine in one memory, as by default: answers are right whatever moves between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine_driver import Original, ask, greedy, hits, tokens_of
from mambacache import LLM
from mambacache.config import EngineConfig
from mambacache.engine import parts
from mambacache.models.adapt import model_skeleton
from mambacache.runner.ngram import history_bytes
from mambacache.runner.sizing import SHARES, plan_memory
from selection import full

ROOM = 14  # slabs beside the slabs of running requests
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODELS = ["qwen3_next", "kimi_linear", "jamba", "falcon_h1", "lfm2", "zamba2"]


@pytest.fixture
def start(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def started(model: str, device: str, room: int = ROOM, **options: object) -> LLM:
        """An engine in little memory, all of it full of NaN."""
        monkeypatch.setattr("mambacache.runner.sizing.MOST_LOST", 0.6)  # tiny states are about as large as a page
        directory, settings = tiny_model(model), {"device": device, "max_num_seqs": 3, "seed": 0, **options}
        ample = plan_memory(EngineConfig(directory, **settings), model_skeleton(directory), 1 << 40)  # type: ignore[arg-type]
        assert ample.slab is not None
        slabs = -(-ample.num_running_states // ample.slab.states) + 1 + room
        memory = int((slabs + 0.5) * ample.slab.nbytes) + 3 * ample.log_bytes
        if "speculative" in options:
            memory += history_bytes(3, ample.max_model_len, 3)
        memory = int(memory / SHARES[device][0])
        monkeypatch.setattr(parts, "usable_memory", lambda *_: memory)
        llm = LLM(directory, **settings)  # type: ignore[arg-type]
        assert llm.sizes.slab == ample.slab and llm.sizes.num_slabs == slabs - 1
        assert llm.runner.pages is not None and llm.runner.pages.buffer is llm.runner.states.buffer
        llm.runner.states.buffer.fill_(0xFF)
        return llm

    return started


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [MODELS[0], *full(*MODELS[1:])])
def test_answers(model: str, device: str, start: Callable[..., LLM], original: Callable[[str], Original]) -> None:
    """Check many short prompts, then few long prompts, and the other way round."""
    rng = random.Random(0)
    llm = start(model, device)
    short = [[*tokens_of(seed, 70), seed] for seed in range(12)]
    long = [[*tokens_of(50 + seed, 64 * 4), seed] for seed in range(2)]
    found = []
    for prompts in (short, short, long, long, short):
        asked = rng.sample(prompts, len(prompts)) * 2
        outputs = ask(llm, asked, greedy(4), together=False)
        original(model).check_all(asked, outputs)
        found.append(sum(hits(outputs)))
    assert found[1] and found[3] and llm.stats.states_evicted
    assert llm.stats.state_blocks["writing"] == llm.stats.kv_blocks["writing"] == 0
    llm._step_loop._scheduler.cache.check()


@pytest.mark.parametrize("device", DEVICES)
def test_with_drafts_a_tier_and_preemption(
    device: str, start: Callable[..., LLM], original: Callable[[str], Original]
) -> None:
    llm = start(
        "qwen3_next", device, room=24, host_cache_bytes=4 << 20, speculative="ngram", max_num_batched_tokens=200
    )
    prompts = [[*tokens_of(seed % 4, 150), *tokens_of(seed, 90)] for seed in range(16)]
    for _ in range(3):
        outputs = ask(llm, prompts, greedy(20))
        original("qwen3_next").check_all(prompts, outputs)
    assert llm.stats.hit_tokens and llm.stats.states_evicted
    llm._step_loop._scheduler.cache.check()


def test_budgets_that_are_given_are_kept_apart(tiny_model: Callable[[str], Path]) -> None:
    llm = LLM(tiny_model("qwen3_next"), device="cpu", max_num_seqs=2, kv_cache_bytes=1 << 20)
    assert llm.sizes.slab is None and llm.runner.pages is not None
    assert llm.runner.pages.buffer is not llm.runner.states.buffer
    assert torch.is_tensor(llm.runner.pages.buffer) and llm.runner.pages.buffer.numel() <= (1 << 20) + 32_768
