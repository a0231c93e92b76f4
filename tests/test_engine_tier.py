"""Whole engines with a tier in host memory: the same tokens, hits that the device alone would not have, and no harm."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine_driver import (
    MODELS,
    Engines,
    Original,
    answer,
    ask,
    greedy,
    hits,
    report_of,
    run_until_idle,
    tokens_of,
)
from mambacache import LLM, SamplingParams
from mambacache.cli import main
from mambacache.demo import MODEL
from mambacache.demo.task import (
    ANSWER_TOKENS,
    DEMO_SEED,
    answer_text,
    demo_document,
    demo_questions,
    question_text,
)
from mambacache.engine.outputs import RequestOutput
from mambacache.report import Loss
from mambacache.runner import host_tier
from selection import full

SMALL: dict[str, Any] = {"num_checkpoints": 2, "num_kv_blocks": 12, "max_num_seqs": 2, "host_cache_bytes": 1 << 28}
PROMPTS = [tokens_of(seed, 150 + seed) for seed in range(7)]
"""Each of them fills 3 of the 12 pages, so that none is left on the device when it comes again."""


@pytest.mark.parametrize("model", [MODELS[0], *full(*MODELS[1:])])
def test_every_model(engine: Engines, original: Callable[[str], Original], model: str) -> None:
    """Prompts come back from the host, and their tokens are the original's."""
    llm = engine(model, **SMALL)
    for _ in range(2):
        outputs = ask(llm, PROMPTS, greedy(4), together=False)
        original(model).check_all(PROMPTS, outputs)
    assert hits(outputs) == [128] * len(PROMPTS)
    stats = llm.stats
    assert stats.host_hit_tokens == sum(report_of(output).from_host for output in outputs) >= 128 * 5
    assert stats.loads >= 5 and stats.failed_transfers == 0
    one = llm.sizes.state_bytes + 2 * llm.sizes.kv_block_bytes
    assert stats.bytes_from_host >= 5 * llm.sizes.state_bytes and stats.bytes_to_host >= 5 * one
    assert re.search(rf"^hit from host memory +{stats.host_hit_tokens:,} \(", str(stats), re.M)


def test_without_a_tier_the_same_prompts_are_lost(engine: Engines) -> None:
    """Check that the hits of the test above come from the tier."""
    llm = engine(**SMALL | {"host_cache_bytes": 0})
    for _ in range(2):
        outputs = ask(llm, PROMPTS, greedy(4), together=False)
    assert hits(outputs) == [0] * len(PROMPTS) and report_of(outputs[0]).losses[Loss.EVICTED] == 128
    assert "host" not in str(llm.stats) and llm.stats.loads == 0


@pytest.mark.parametrize("budget", [64, *full(8192)])
def test_together_and_in_turns_of_chats(engine: Engines, original: Callable[[str], Original], budget: int) -> None:
    """Check that requests without a load go ahead, and that a prefix for several waiting requests is loaded once."""
    llm = engine(**SMALL | {"max_num_seqs": 4, "num_kv_blocks": 20}, max_num_batched_tokens=budget)
    turns: list[list[int]] = PROMPTS
    for number in range(3):
        outputs = ask(llm, turns, greedy(6))
        original("qwen3_next").check_all(turns, outputs)
        turns = [
            [*turn, *answer(output), *tokens_of(90 + number, 5)] for turn, output in zip(turns, outputs, strict=True)
        ]
    shared = [[*tokens_of(60, 200), *tokens_of(seed, 30)] for seed in range(61, 64)]
    ask(llm, [shared[0][:200]], greedy(2))  # once: a prefix that goes on is evicted late
    ask(llm, [tokens_of(seed, 200) for seed in range(70, 90)], greedy(2), together=False)
    before = llm.stats
    outputs = ask(llm, shared, greedy(3))
    original("qwen3_next").check_all(shared, outputs)
    assert [report_of(output).from_host for output in outputs] == [192] * 3 and llm.stats.loads == before.loads + 1


def test_loads_that_end_while_a_step_is_planned(
    engine: Engines, original: Callable[[str], Original], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step asks before it is planned, when nothing is over, and behind that, when all is."""
    llm = engine(**SMALL)
    ask(llm, PROMPTS, greedy(2), together=False)
    ended, calls = host_tier.HostTier.ended, count()
    monkeypatch.setattr(host_tier.HostTier, "ended", lambda tier: ended(tier) if next(calls) % 2 else {})
    outputs = ask(llm, PROMPTS, greedy(4), together=False)
    original("qwen3_next").check_all(PROMPTS, outputs)
    assert llm.stats.host_hit_tokens > 0


def test_a_failing_transfer_costs_a_miss(
    engine: Engines,
    original: Callable[[str], Original],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = engine(**SMALL)
    ask(llm, PROMPTS, greedy(2), together=False)
    copy, calls = host_tier.copy_blocks, []

    def failing(*args: Any) -> None:
        calls.append(args)
        raise RuntimeError("planted")

    monkeypatch.setattr(host_tier, "copy_blocks", failing)
    with caplog.at_level(logging.ERROR):
        outputs = ask(llm, PROMPTS, greedy(4), together=False)
    original("qwen3_next").check_all(PROMPTS, outputs)
    assert len(calls) > 3 and caplog.text.count("which is said once: it costs a miss") == 1
    assert llm.stats.failed_transfers == len(calls) and llm.stats.host_hit_tokens == 0
    monkeypatch.setattr(host_tier, "copy_blocks", copy)
    for _ in range(2):
        outputs = ask(llm, PROMPTS, greedy(4), together=False)
    assert hits(outputs) == [128] * len(PROMPTS) and llm.stats.host_hit_tokens > 0


def test_faults_in_the_tier_itself_cost_misses(
    engine: Engines, original: Callable[[str], Original], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no request ends for an error that the tier raises, in a launch or in a report."""
    llm = engine(**SMALL)
    tier = llm._step_loop._tier
    assert tier is not None
    for name in ("launch", "ended", "forget"):
        call, count = getattr(tier, name), iter(range(1000))

        def sometimes(*args: Any, call: Any = call, count: Any = count) -> Any:
            if next(count) % 7 == 1:
                raise ValueError("planted")
            return call(*args)

        monkeypatch.setattr(tier, name, sometimes)
    for _ in range(2):
        outputs = ask(llm, PROMPTS, greedy(4), together=False)
        original("qwen3_next").check_all(PROMPTS, outputs)
    assert llm.stats.loads > 0


def test_reset_and_abort_in_the_midst_of_a_load(engine: Engines, original: Callable[[str], Original]) -> None:
    llm = engine(**SMALL)
    ask(llm, PROMPTS, greedy(2), together=False)
    for prompt in PROMPTS[:2]:
        request_id = llm.submit(prompt, greedy(4))
        llm.step()
        llm.abort(request_id)
        run_until_idle(llm)
    assert llm.stats.loads >= 2
    llm.submit(PROMPTS[2], greedy(4))
    llm.step()
    loads = llm.stats.loads
    llm.reset_prefix_cache()
    outputs = list(run_until_idle(llm).values())
    original("qwen3_next").check_all([PROMPTS[2]], outputs)
    assert hits(outputs) == [0]
    assert hits(ask(llm, PROMPTS[:1], greedy(2))) == [0] and llm.stats.loads == loads


def test_salts_share_nothing(engine: Engines) -> None:
    llm = engine(**SMALL)
    ask(llm, PROMPTS, greedy(2, salt="one"), together=False)
    assert hits(ask(llm, PROMPTS, greedy(2, salt="other"), together=False)) == [0] * len(PROMPTS)
    assert llm.stats.loads == 0


def test_a_load_that_takes_longer_than_computing_is_left_alone(engine: Engines) -> None:
    llm = engine(**SMALL, host_bytes_per_token=1)
    for _ in range(2):
        outputs = ask(llm, PROMPTS, greedy(2), together=False)
    assert hits(outputs) == [0] * len(PROMPTS) and llm.stats.loads == 0 and llm.stats.bytes_to_host > 0


@pytest.mark.parametrize("device", [*full("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recall_with_two_states_on_the_device(device: str) -> None:
    """A trained model answers from states that went to the host and came back, 20 of 20."""
    with LLM(MODEL, device=device, max_model_len=8192, max_num_seqs=2) as llm:
        sizes = llm.sizes
    document = demo_document(DEMO_SEED)
    budgets = {
        "checkpoint_budget_bytes": 2 * sizes.state_bytes,
        "kv_cache_bytes": 3 * (document.num_tokens // 64 + 4) * sizes.kv_block_bytes,
        "host_cache_bytes": 1 << 28,
    }
    llm = LLM(MODEL, device=device, max_model_len=8192, max_num_seqs=2, **budgets)
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def ask_one(text: str) -> RequestOutput:
        return llm.generate(text, params, use_tqdm=False)[0]

    others = [demo_document(DEMO_SEED + 1 + i).text for i in range(4)]
    for text in [document.text, *others]:
        ask_one(text)
    right = from_host = 0
    for number, (name, place) in enumerate(demo_questions(document, DEMO_SEED)):
        output = ask_one(f"{document.text} {question_text(name)}")
        assert output.cache is not None and output.cache.hit == document.boundary
        right += output.outputs[0].text == answer_text(place)
        from_host += output.cache.from_host > 0
        for other in range(3):
            ask_one(others[(number + other) % 4])
    assert right == from_host == 20
    llm.close()


def test_sizes_and_plan(text_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a state comes with 10,000 tokens of KV. The plan prints the engine's sizes before anything is
    loaded."""
    llm = LLM(text_model, device="cpu", max_num_seqs=2, host_cache_bytes=100_000_000)
    sizes = llm.sizes
    assert sizes.num_host_pages / sizes.num_host_states == pytest.approx(10_000 / 64, rel=0.1)
    taken = sizes.num_host_states * sizes.state_bytes + sizes.num_host_pages * sizes.kv_block_bytes
    assert 0 <= 100_000_000 - taken < sizes.kv_block_bytes
    assert main(["plan", str(text_model), "--device", "cpu", "--host-cache-bytes", "100MB"]) == 0
    states, pages = sizes.num_host_states, sizes.num_host_pages
    row = f"host memory                 {states:,} states and {pages:,} KV blocks, {taken:,} bytes"
    assert row in capsys.readouterr().out
    llm.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_cache_bytes": 1000}, "one state and one KV block take"),
        ({"host_cache_bytes": -1}, "set it to 0 or more"),
        ({"host_cache_bytes": 1 << 60}, "the host has [0-9,]+ free: lower it"),
    ],
)
def test_refused(text_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(text_model, device="cpu", max_num_seqs=2, **options)


def test_not_used_without_a_cache(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(text_model, device="cpu", max_num_seqs=2, enable_prefix_caching=False, host_cache_bytes=1 << 24)
    assert "host_cache_bytes is 16777216 and not used" in caplog.text and llm._step_loop._tier is None
