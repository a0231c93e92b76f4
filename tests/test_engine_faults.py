"""Check that a fault ends only the request that it concerns. The others finish, and cached prefixes still hit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_driver import Engines, Original, answer, ask, greedy, hits, run_until_idle, speak, tokens_of
from mambacache import LLM, SamplingParams
from mambacache.plan import StepPlan
from mambacache.runner.cuda_graphs import DecodeGraph
from mambacache.scheduler.request import Request
from selection import full
from tiny_models import VOCABULARY

Originals = Callable[[str], Original]

CACHED = tokens_of(1, 150)


@pytest.fixture
def no_tokenizer(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    """A checkpoint for which no tokenizer can be loaded."""
    for path in tiny_model("olmo_hybrid").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@contextmanager
def failing(
    llm: LLM, fails: Callable[[StepPlan], bool], kind: type[BaseException] = RuntimeError
) -> Iterator[list[int]]:
    """Has the steps for which `fails` holds raise in the last recurrent layer, when the others have written their
    states; gives a list that grows by the number of rows of each."""
    launch, last = llm.runner.launch, llm.runner.model.mixers[-1]
    forward, replay, failed = last.forward, DecodeGraph.replay, []
    armed = False

    def break_down(*args: Any, **options: Any) -> torch.Tensor:
        if armed:
            raise kind("planted")
        return forward(*args, **options)

    def watched(plan: StepPlan, *args: Any) -> Any:
        nonlocal armed
        armed = fails(plan)
        if armed:
            failed.append(len(plan.steps))
        return launch(plan, *args)

    def break_off(graph: DecodeGraph, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = replay(graph, indices)
        if armed:
            raise kind("planted")
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last, "forward", break_down)
        patch.setattr(DecodeGraph, "replay", break_off)
        patch.setattr(llm.runner, "launch", watched)
        yield failed


def still_serves(llm: LLM, original: Original) -> None:
    """Check that the prompt cached before is hit, and answered as ever."""
    output = ask(llm, [CACHED], greedy(3))
    original.check_all([CACHED], output)
    assert hits(output) == [128]


@pytest.mark.parametrize(
    "options",
    [*full({}, {"max_num_batched_tokens": 70}, {"max_num_seqs": 3}), {"num_kv_blocks": 12, "num_checkpoints": 3}],
)
def test_steps_that_fail_now_and_then(engine: Engines, original: Originals, options: dict[str, int]) -> None:
    """Every request recovers, alone, and none ends with an error."""
    llm = engine(**options)
    ask(llm, [CACHED], greedy(1))
    rng = random.Random(0)
    prompts = [CACHED, tokens_of(2, 140), [*CACHED, *tokens_of(3, 20)], tokens_of(4, 60), tokens_of(5, 1)]
    params = [greedy(12), greedy(20), greedy(12, n=3), greedy(12), greedy(30)]
    with failing(llm, lambda plan: len(plan.steps) > 1 and rng.random() < 0.3) as failed:
        outputs = ask(llm, prompts, params)
    assert len(failed) > 1
    original("qwen3_next").check_all(prompts, outputs)
    assert {completion.finish_reason for output in outputs for completion in output.outputs} == {"length"}
    assert hits(outputs)[0] == 128
    still_serves(llm, original("qwen3_next"))


@pytest.mark.parametrize("when", ["prefilling", "decoding"])
@pytest.mark.parametrize("answers", [1, 3])
def test_request_whose_steps_always_fail(engine: Engines, original: Originals, when: str, answers: int) -> None:
    """Check that a request ends with the error if its steps fail from some token on. The requests beside it finish."""
    llm = engine(max_num_batched_tokens=100)
    ask(llm, [CACHED], greedy(1))
    prompts = [tokens_of(6, 100), tokens_of(7, 170), tokens_of(8, 130)]
    ids = [llm.submit(prompt, greedy(15, n=answers if i == 1 else 1)) for i, prompt in enumerate(prompts)]

    position = 100 if when == "prefilling" else 173

    def reached(plan: StepPlan) -> bool:
        return any(s.request_id == ids[1] and s.start + s.num_tokens >= position for s in plan.steps)

    with failing(llm, reached) as failed:
        outputs = run_until_idle(llm)
    assert failed[-1] == 1
    first, *others = outputs[ids[1]].outputs
    assert (first.finish_reason, first.error) == ("error", "RuntimeError: planted")
    assert len(others) == answers - 1
    for completion in others:
        assert completion.finish_reason == ("error" if when == "prefilling" else "length")
    done = [(0, outputs[ids[0]].outputs[0]), (2, outputs[ids[2]].outputs[0])]
    for i, completion in done + [(1, other) for other in others if when == "decoding"]:
        original("qwen3_next").check(prompts[i], completion.token_ids)
        assert len(completion.token_ids) == 15
    still_serves(llm, original("qwen3_next"))


def test_failed_step_with_drafts(engine: Engines, original: Originals) -> None:
    prompts = [tokens_of(9, 120), tokens_of(10, 60)]
    llm = engine(draft=lambda request, limit: [7] * min(limit, 4), max_draft_tokens=4)
    ask(llm, [CACHED], greedy(1))
    steps = iter(range(100))
    with failing(llm, lambda _: next(steps) in (2, 7, 8)):
        original("qwen3_next").check_all(prompts, ask(llm, prompts, greedy(12)))
    still_serves(llm, original("qwen3_next"))


@pytest.mark.parametrize("given", [None, [10**6], [7, VOCABULARY], [-1, 7]])
def test_failing_draft_source(
    engine: Engines, original: Originals, caplog: pytest.LogCaptureFixture, given: list[int] | None
) -> None:
    """It raises, or gives what is no token of the model: rows go on without drafts, and nothing that the step had taken
    is lost. The log says so once."""
    calls = iter(range(100))

    def draft(request: Request, limit: int) -> list[int]:
        if next(calls) % 3 != 1:
            return [7] * limit
        if given is None:
            raise RuntimeError("planted")
        return given

    prompts = [tokens_of(9, 120), tokens_of(10, 60)]
    llm = engine(draft=draft, max_draft_tokens=4)
    ask(llm, [CACHED], greedy(1))
    with failing(llm, lambda plan: not set(plan.arrays["tokens"].tolist()) <= set(range(VOCABULARY))) as failed:
        original("qwen3_next").check_all(prompts, ask(llm, prompts, greedy(12)))
    assert not failed
    assert caplog.text.count("go on without") == 1 and next(calls) > 9
    still_serves(llm, original("qwen3_next"))


def test_interrupt(engine: Engines, original: Originals) -> None:
    """Ctrl-C ends the call and its requests, and nothing else."""
    llm = engine()
    ask(llm, [CACHED], greedy(1))
    with failing(llm, lambda plan: not plan.steps[0].prefill, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        ask(llm, [tokens_of(11, 80), tokens_of(12, 80)], greedy(5))
    assert llm.idle
    still_serves(llm, original("qwen3_next"))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupt_of_a_lone_request(engine: Engines, original: Originals, kind: type[BaseException]) -> None:
    """It is no fault of the request: stepped by hand it goes on."""
    llm = engine()
    ask(llm, [CACHED], greedy(1))
    request_id = llm.submit(CACHED, greedy(5))
    with failing(llm, lambda plan: True, kind), pytest.raises(kind):
        llm.step()
    output = run_until_idle(llm)[request_id]
    assert output.outputs[0].finish_reason == "length"
    original("qwen3_next").check_all([CACHED], [output])
    still_serves(llm, original("qwen3_next"))


@pytest.mark.parametrize("stuck", [False, True])
def test_nothing_can_be_planned(engine: Engines, original: Originals, stuck: bool) -> None:
    """The call says so, and leaves nothing in line."""
    llm = engine()
    ask(llm, [CACHED], greedy(1))
    calls = []

    def schedule() -> None:
        calls.append(stuck)
        if not stuck:
            raise LookupError("planted")

    error: tuple[type[Exception], str] = (LookupError, "planted")
    if stuck:
        error = RuntimeError, "nothing can run and 2 requests are left"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error[0], match=error[1]):
        patch.setattr(llm._step_loop._scheduler, "schedule", schedule)
        ask(llm, [tokens_of(11, 80), tokens_of(12, 80)], greedy(5))
    assert llm.idle and len(calls) == (1 if stuck else 3)
    still_serves(llm, original("qwen3_next"))


def test_device_that_fails_for_good(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nand much more")

    llm = LLM(tiny_model("qwen3_next"), device="cpu", kv_cache_bytes=1 << 20, max_num_seqs=4)
    stream = llm.stream(CACHED, greedy(50))
    next(stream)
    monkeypatch.setattr(llm._step_loop, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(llm.runner, "launch", fail)
    sentence = "the CUDA device failed (RuntimeError: CUDA error: unspecified launch failure): start a new process"
    for output in (*ask(llm, [CACHED] * 3, greedy(5)), next(stream)):
        assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", sentence)
    assert next(stream, None) is None and llm.idle
    for call in (llm.step, lambda: llm.submit(CACHED), lambda: llm.generate(CACHED), lambda: next(llm.stream(CACHED))):
        with pytest.raises(RuntimeError) as error:
            call()
        assert str(error.value) == sentence


def test_planted_copy_is_seen(engine: Engines) -> None:
    """The watch over every test of the engine sees a state that is copied."""
    llm = engine()
    ask(llm, [CACHED], greedy(1))
    launch = llm.runner.launch

    def copying(*args: Any) -> Any:
        pool = llm.runner.states.layers[0][1]
        pool[2] = pool[1]
        return launch(*args)

    llm.runner.launch = copying  # type: ignore[method-assign]
    completion = ask(llm, [CACHED], greedy(1))[0].outputs[0]
    assert completion.finish_reason == "error" and "touches the state pool" in (completion.error or "")
    assert len(engine.watch.offences) == 1
    engine.watch.offences.clear()


# --- what is refused ---

REFUSED: dict[str, tuple[list[list[int]], dict[str, Any], str]] = {
    "empty": ([[]], {}, "^prompt 0 is empty: give"),
    "empty among others": ([CACHED, []], {}, "^prompt 1 is empty: give"),
    "above the vocabulary": ([[5, 160, 6]], {}, "^prompt 0 holds token 160, .* give ids from 0 to 159"),
    "negative token": ([CACHED, CACHED, [5, -1]], {}, "^prompt 2 holds token -1, .* give ids"),
    "longer than the model": ([tokens_of(20, 400)], {"max_tokens": 101}, "^prompt 0 .* 500 in all: .* or lower max_"),
    "longer than the pool": ([tokens_of(20, 300)], {"max_tokens": 85}, "^prompt 0 .* holds 384: .* raise kv_"),
    "too many parameters": ([CACHED], {"params": 2}, "1 prompts came with 2 sampling_params: give"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_prompts(engine: Engines, original: Originals, case: str) -> None:
    prompts, options, message = REFUSED[case]
    llm = engine(max_model_len=500, num_kv_blocks=6)
    ask(llm, [CACHED], greedy(1))
    count = options.pop("params", None)
    params = greedy(**options) if count is None else [greedy()] * count
    with pytest.raises(ValueError, match=message) as error:
        llm.generate(prompts, params, use_tqdm=False)
    assert "\n" not in str(error.value)
    assert llm.idle
    still_serves(llm, original("qwen3_next"))


def test_longest_prompts_that_fit(engine: Engines, original: Originals) -> None:
    llm = engine(max_model_len=384, num_kv_blocks=6)
    ask(llm, [CACHED], greedy(1))
    assert len(answer(ask(llm, [tokens_of(20, 300)], greedy(84))[0])) == 84
    ask(llm, [CACHED], greedy(1))
    still_serves(llm, original("qwen3_next"))


def test_ids_in_use(engine: Engines) -> None:
    llm = engine()
    llm.submit(CACHED, greedy(), request_id="a/1")
    for request_id, n in (("a/1", 1), ("a", 2)):
        with pytest.raises(ValueError, match=f"id '{request_id}' is in use: choose another"):
            llm.submit(CACHED, greedy(n=n), request_id=request_id)
    assert set(run_until_idle(llm)) == {"a/1"}
    assert llm.submit(CACHED, greedy(n=2), request_id="a") == "a"
    assert set(run_until_idle(llm)) == {"a"}


def test_without_a_tokenizer(engine: Engines, no_tokenizer: Path) -> None:
    with pytest.warns(UserWarning, match="has no tokenizer that can be loaded: give prompts as token ids"):
        llm = engine(no_tokenizer)
    with pytest.raises(ValueError, match="has no tokenizer: give the prompt as token ids"):
        llm.generate("text", use_tqdm=False)
    with pytest.raises(ValueError, match="has no tokenizer: use stop_token_ids"):
        llm.generate(CACHED, SamplingParams(stop=["."]), use_tqdm=False)
    with pytest.raises(ValueError, match="has no chat template: use generate"):
        llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)
    output = ask(llm, [CACHED], greedy(2))[0].outputs[0]
    assert len(output.token_ids) == 2 and output.text == output.delta == ""


def test_empty_text(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        llm.generate(["hello", ""], use_tqdm=False)
    speak(llm, "well")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llm.generate("hello", use_tqdm=False)[0].outputs[0].text == "well"
    assert llm.generate([], use_tqdm=False) == []
