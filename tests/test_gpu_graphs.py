"""Decode steps in CUDA graphs equal the same padded steps without graphs in every bit, and the loop never waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engine_driver import MODELS, Engines, ask, greedy, tokens_of
from mambacache import LLM, RequestOutput, SamplingParams
from mambacache.kernels import StateIndices
from mambacache.models.adapt import Model, load_model
from mambacache.plan import StepPlan
from mambacache.runner.cuda_graphs import DecodeGraph
from mambacache.runner.model_runner import ModelRunner
from mambacache.runner.sampler import RowSampling, likeliest_tokens
from runner_driver import Driver, Row

pytestmark = pytest.mark.gpu

EXPERTS = ("qwen3_next_moe", "jamba", "kimi_linear", "lfm2_moe", "granitemoehybrid", "nemotron_h")
"""Products by expert of these models wait for the device in float32."""

GREEDY = RowSampling(SamplingParams(temperature=0), (0,))
ROWS, DRAFTS, PAGES = 4, 2, 8


@pytest.fixture
def engines(tiny_model: Callable[[str], Path]) -> Iterator[Engines]:
    with Engines(tiny_model, "cuda") as engines:
        yield engines
    engines.check()


def dtype_of(model: str) -> str:
    return "bfloat16" if model in EXPERTS else "float32"


def run(model: Model, eager: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the logits of some steps of different sizes, and the pool of states after them."""
    driver, found = Driver(model), []
    runner = driver.runner
    runner.capture(ROWS, DRAFTS, PAGES)
    assert runner._graphs is not None
    replay = DecodeGraph.replay

    def noting(graph: DecodeGraph, indices: StateIndices) -> tuple[torch.Tensor, torch.Tensor]:
        pages = runner.pages.layers if runner.pages is not None else []
        if eager:
            logits = model.logits(indices, runner.states.layers, runner.logs.layers, pages)
            likeliest = likeliest_tokens(logits)
        else:
            logits, likeliest = replay(graph, indices)
        found.append(logits.clone())
        return logits, likeliest

    requests = [driver.add(tokens_of(seed, length)) for seed, length in enumerate((3, 63, 70, 130))]
    for request in requests:
        request.tokens += driver.execute([Row(request, len(request.tokens))], [GREEDY])[0].tokens
    with patch.object(DecodeGraph, "replay", noting):
        for drafts in ((), (5,), (6, 7)):
            for count in (1, 2, 3, 4):
                rows = [Row(request, drafts=drafts[: i + 1]) for i, request in enumerate(requests[:count])]
                outputs = driver.execute(rows, [GREEDY] * count)
                for request, output in zip(requests, outputs, strict=False):
                    request.tokens += output.tokens[-1:]
    return found, driver.runner.states.buffer.clone()


@pytest.mark.parametrize("name", MODELS)
def test_a_replay_is_bitwise_the_same_step_without_a_graph(name: str, tiny_model: Callable[[str], Path]) -> None:
    model = load_model(tiny_model(name), dtype_of(name), "cuda")
    (captured, states), (eager, eager_states) = run(model, eager=False), run(model, eager=True)
    assert len(captured) == len(eager) == 12
    for one, other in zip(captured, eager, strict=True):
        assert not one.isnan().any() and torch.equal(one, other)
    assert torch.equal(states, eager_states)


@pytest.mark.parametrize("name", MODELS)
def test_no_step_waits_compiles_or_captures(name: str, engines: Engines) -> None:
    """Steps wait for nothing but tokens of the step before.

    Prompts, hits, chunks and decode have run in other sizes before.
    """
    llm = engines(name, dtype=dtype_of(name), max_num_batched_tokens=96)
    drawn = greedy(20, temperature=0.7, seed=1, logprobs=2), greedy(12, temperature=0.7, seed=2, top_k=5, min_tokens=3)
    params = [greedy(20), *drawn, greedy(20, temperature=0.7, seed=3, top_p=0.9)]

    def run(more: int) -> list[RequestOutput]:
        prompts = [tokens_of(1, 150 + more), [*tokens_of(1, 100), *tokens_of(2, 60 + more)], tokens_of(3, 5 + more)]
        return ask(llm, [*prompts, tokens_of(4, 40 + more)], params)

    first = run(0)
    llm.reset_prefix_cache()
    with patch.object(torch.cuda, "graph", side_effect=AssertionError("captures")), compiling() as compiled:
        torch.cuda.set_sync_debug_mode("error")
        try:
            second = run(13)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not compiled
    for one, other in zip(first, second, strict=True):
        assert one.outputs[0].finish_reason == other.outputs[0].finish_reason == "length"


class compiling:
    """Collect the kernels that Triton compiles inside."""

    def __enter__(self) -> list[str]:
        import triton

        names: list[str] = []
        self._runtime, self._before = triton.knobs.runtime, triton.knobs.runtime.jit_post_compile_hook

        def hook(*args: Any, **options: Any) -> None:
            names.append(str(options.get("repr") or args))

        self._runtime.jit_post_compile_hook = hook
        return names

    def __exit__(self, *_: object) -> None:
        self._runtime.jit_post_compile_hook = self._before


def test_decode_steps_are_replays(engines: Engines) -> None:
    """A step is launched before the step before it is read."""
    llm, replays, unread = engines(max_num_seqs=5), [], []
    launch, replay = llm.runner.launch, DecodeGraph.replay

    def launching(plan: StepPlan, *args: Any) -> Any:
        unread.append(len(args) > 1 and args[1] is not None)
        return launch(plan, *args)

    llm.runner.launch = launching  # type: ignore[method-assign]

    def replaying(graph: DecodeGraph, indices: StateIndices) -> tuple[torch.Tensor, torch.Tensor]:
        replays.append((graph.rows, graph.width))
        return replay(graph, indices)

    with patch.object(DecodeGraph, "replay", replaying):
        ask(llm, [tokens_of(seed, 20) for seed in range(3)], greedy(9))
    assert replays == [(4, 1)] * 8
    assert unread == [False] + [True] * 8


def wait() -> None:
    torch.zeros(1, device="cuda").item()


def wait_unseen() -> None:
    """Wait in a way that is not seen before a capture, and that spoils it."""
    torch.cuda.current_stream().synchronize()


def fail_in_a_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the memory does not suffice")


@pytest.mark.parametrize("fault", [wait, wait_unseen, fail_in_a_capture])
def test_a_model_that_cannot_be_captured_runs_without_graphs(
    fault: Callable[[], None], engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine logs it once, and gives the same answers."""
    right = ask(engines(), [tokens_of(1, 20)], greedy(9))[0].outputs[0].token_ids
    capture = ModelRunner.capture

    def faulty(runner: ModelRunner, *args: int) -> None:
        last = runner.model.mixers[-1]
        forward = last.forward  # type: ignore[attr-defined]

        def slow(*args: Any, **options: Any) -> torch.Tensor:
            fault()
            return forward(*args, **options)

        last.forward = slow  # type: ignore[attr-defined]
        capture(runner, *args)

    with patch.object(ModelRunner, "capture", faulty):
        llm = engines()
    assert len([record for record in caplog.records if "without CUDA graphs" in record.getMessage()]) == 1
    assert ask(llm, [tokens_of(1, 20)], greedy(9))[0].outputs[0].token_ids == right


def test_enforce_eager_replays_no_graph(engines: Engines) -> None:
    llm: LLM = engines(enforce_eager=True)
    with patch.object(DecodeGraph, "replay", side_effect=AssertionError("a graph")):
        assert ask(llm, [tokens_of(1, 20)], greedy(9))[0].outputs[0].finish_reason == "length"
