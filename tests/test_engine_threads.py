"""Check that a second caller is turned away at once, and that the first caller's answers stay the same."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_driver import Engines, Original, answer, ask, greedy, run_until_idle, speak, tokens_of
from mambacache import LLM, SamplingParams
from mambacache.engine.outputs import RequestOutput

Originals = Callable[[str], Original]

BUSY = "another call is inside this LLM: call it from one thread at a time"
PROMPTS = [tokens_of(i, 60 + i) for i in range(6)]


def test_threads(engine: Engines, original: Originals) -> None:
    """Check threads with different prompts: each answer is right, and the other calls are turned away."""
    llm = engine()
    outputs: list[tuple[int, RequestOutput]] = []
    errors: list[BaseException] = []
    together = threading.Barrier(len(PROMPTS))

    def work(index: int) -> None:
        together.wait()
        for call in range(8):
            try:
                if call % 2:
                    outputs.append((index, ask(llm, [PROMPTS[index]], greedy(3))[0]))
                else:
                    outputs.append((index, [*llm.stream(PROMPTS[index], greedy(3))][-1]))
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(error) for error in errors} <= {RuntimeError}
    assert all(str(error).startswith(BUSY) for error in errors)
    assert outputs and len(outputs) + len(errors) == 48
    for index, output in outputs:
        assert len(answer(output)) == 3
        original("qwen3_next").check(PROMPTS[index], answer(output))
    run_until_idle(llm)
    original("qwen3_next").check_all(PROMPTS, ask(llm, PROMPTS, greedy(3)))


CALLS: list[Callable[[LLM], object]] = [
    lambda llm: ask(llm, PROMPTS[:1], greedy(1)),
    lambda llm: llm.submit(PROMPTS[0], greedy(1)),
    lambda llm: next(llm.stream(PROMPTS[0], greedy(1))),
    lambda llm: llm.step(),
    lambda llm: llm.abort("request-0"),
    lambda llm: llm.reset_prefix_cache(),
]


def test_second_caller_is_turned_away_at_once(engine: Engines, original: Originals) -> None:
    """Check every call of a second caller while the first caller is in the midst of a step."""
    llm = engine()
    launch = llm.runner.launch
    errors: list[str] = []

    def call_all() -> None:
        for call in CALLS:
            try:
                call(llm)
            except RuntimeError as error:
                errors.append(str(error))

    def watched(*args: Any) -> Any:
        second = threading.Thread(target=call_all)
        second.start()
        second.join(60)
        assert not second.is_alive() and not llm.idle
        return launch(*args)

    llm.runner.launch = watched  # type: ignore[method-assign]
    output = ask(llm, PROMPTS[:1], greedy(3))[0]
    original("qwen3_next").check_all(PROMPTS[:1], [output])
    assert len(errors) == 3 * len(CALLS) and all(error.startswith(BUSY) for error in errors)
    assert llm.stats.requests == 1


def test_draft_source_that_calls_its_engine(engine: Engines, original: Originals) -> None:
    refused = []

    def draft(request: Any, limit: int) -> list[int]:
        for call in CALLS:
            with pytest.raises(RuntimeError, match=BUSY):
                call(llm)
            refused.append(call)
        return [7] * limit

    llm = engine(draft=draft, max_draft_tokens=3)
    original("qwen3_next").check_all(PROMPTS[:2], ask(llm, PROMPTS[:2], greedy(4)))
    assert len(refused) > len(CALLS)


def test_tokenizer_that_calls_its_engine(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    speak(llm, "well", "well")
    decode, refused = llm.tokenizer.decode, []

    def calling(*args: Any, **options: Any) -> str:
        with pytest.raises(RuntimeError, match=BUSY):
            llm.generate("x", greedy(1), use_tqdm=False)
        refused.append(args)
        return decode(*args, **options)

    llm.tokenizer.decode = calling
    assert llm.generate("x", SamplingParams(max_tokens=9), use_tqdm=False)[0].outputs[0].text == "well"
    assert refused


@pytest.mark.parametrize("collected", [False, True])
def test_stream_that_is_closed_in_mid_step(
    engine: Engines, original: Originals, collected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a collector, which may run at any moment: its request ends with the call, and not inside of the step."""
    streams: list[Iterator[RequestOutput]] = []
    ended = []

    def draft(request: Any, limit: int) -> list[int]:
        while streams:
            stream = streams.pop()
            if not collected:
                stream.close()  # type: ignore[attr-defined]
            del stream
            gc.collect()
            ended.append(answers.output.finished)
        return []

    llm = engine(draft=draft, max_draft_tokens=1)
    stream = llm.stream(PROMPTS[0], greedy(50))
    next(stream)
    [answers] = llm._step_loop.answers.values()
    streams.append(stream)
    del stream
    original("qwen3_next").check_all(PROMPTS[1:3], ask(llm, PROMPTS[1:3], greedy(4)))
    assert ended and not any(ended) and llm.idle
    assert not caplog.records, "neither the draft source nor the step failed"


def test_stream_whose_id_is_given_again(engine: Engines, original: Originals) -> None:
    """Check that a stream has ended with its aborted request, even if a new request runs under the same id."""
    llm = engine()
    stream = llm.stream(PROMPTS[0], greedy(50))
    request_id = next(stream).request_id
    llm.abort(request_id)
    assert llm.submit(PROMPTS[1], greedy(4), request_id=request_id) == request_id
    assert next(stream, None) is None
    output = run_until_idle(llm)[request_id]
    assert len(answer(output)) == 4
    original("qwen3_next").check(PROMPTS[1], answer(output))
