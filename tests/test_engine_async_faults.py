"""`AsyncLLM` where readers are slow or gone, and where the thread is broken off: nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engine_driver import answer, byte_tokenizer, greedy, save_text_model, tokens_of
from mambacache import LLM, AsyncLLM, RequestOutput, SamplingParams
from mambacache.engine import async_llm

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_bytes": 8 << 20, "checkpoint_budget_bytes": 4 << 20, "seed": 0}
PROMPT = tokens_of(0, 40)

broken_off = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("model"))


def run(model: Path, act: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with AsyncLLM(model, **OPTIONS, **options) as llm:
            await act(llm)

    asyncio.run(asyncio.wait_for(main(), 60))


async def rest(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def answered(llm: AsyncLLM, *args: Any) -> list[RequestOutput]:
    return await rest(llm.generate(*args))


async def ended(llm: AsyncLLM) -> None:
    """All requests have, whether or not that was read."""
    while llm._consumers:
        await asyncio.sleep(0.005)


async def check_closed(readers: list[asyncio.Task[Any]], cause: type[BaseException | None]) -> None:
    errors = await asyncio.gather(*readers, return_exceptions=True)
    for error in errors:
        assert isinstance(error, RuntimeError) and "is closed: make a new one" in str(error)
        assert isinstance(error.__cause__, cause)
    assert len(set(map(id, errors))) == len(readers)


def test_loop_that_is_closed(model: Path) -> None:
    """Its request is aborted."""
    llm = AsyncLLM(model, **OPTIONS)
    abort, aborted = llm._llm.abort, []

    def watched(request_id: str) -> None:
        aborted.append(request_id)
        abort(request_id)

    llm._llm.abort = watched  # type: ignore[method-assign]
    loop = asyncio.new_event_loop()
    streams = [llm.generate(PROMPT, greedy(1000), f"mine-{i}") for i in range(2)]
    for stream in streams:
        loop.run_until_complete(anext(stream))
    loop.close()

    async def main() -> None:
        await asyncio.wait_for(ended(llm), 60)
        assert sorted(aborted) == ["mine-0", "mine-1"]
        await llm.close()

    asyncio.run(main())


@pytest.mark.parametrize("blocks", [False, True])
def test_reader_that_is_slow(model: Path, blocks: bool) -> None:
    """Check that all unread tokens are one output, whether the reader waits for something else or holds up its loop."""
    params = greedy(60, n=2, logprobs=1, prompt_logprobs=1)
    with LLM(model, **OPTIONS) as alone:
        [expected] = alone.generate(PROMPT, params, use_tqdm=False)

    async def act(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPT, params)
        first = await anext(stream)
        if blocks:
            while llm._consumers:
                time.sleep(0.005)
        else:
            await ended(llm)
        [last] = await rest(stream)
        assert first.prompt_logprobs == last.prompt_logprobs == expected.prompt_logprobs
        for i, completion in enumerate(last.outputs):
            assert answer(last, i) == answer(expected, i) and completion.finish_reason == "length"
            assert completion.logprobs == expected.outputs[i].logprobs
            assert first.outputs[i].delta + completion.delta == completion.text == expected.outputs[i].text
            assert len(answer(first, i)) < 60

    run(model, act)


def test_readers_that_pause_at_random(model: Path) -> None:
    """Each gets all of its text, each part of it once."""
    rng = random.Random(0)

    async def read(llm: AsyncLLM, i: int) -> None:
        text = ""
        async for output in llm.generate(tokens_of(i, 10 + i), SamplingParams(temperature=1, seed=i, max_tokens=80)):
            text += output.outputs[0].delta
            assert output.outputs[0].text == text
            await asyncio.sleep(rng.random() / 50 if rng.random() < 0.3 else 0)
        assert output.finished
        assert text == byte_tokenizer().decode(answer(output), skip_special_tokens=True)

    async def act(llm: AsyncLLM) -> None:
        await asyncio.gather(*(read(llm, i) for i in range(12)))

    run(model, act)


def test_error_after_an_unread_output(model: Path) -> None:
    async def act(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPT, greedy(1000))
        first = await anext(stream)
        consumer = llm._consumers[first.request_id]
        while consumer._output is None:
            await asyncio.sleep(0.001)
        llm._llm._step_loop._scheduler.schedule = planted  # type: ignore[method-assign]
        await ended(llm)
        unread = await anext(stream)
        assert first.outputs[0].delta + unread.outputs[0].delta == unread.outputs[0].text
        assert len(answer(unread)) > len(answer(first)) and not unread.finished
        with pytest.raises(LookupError, match="planted"):
            await anext(stream)

    run(model, act)


def planted(*_: Any) -> Any:
    raise LookupError("planted")


def test_step_and_abort_that_raise(model: Path) -> None:
    """Check that readers get the step's error, and that later requests get an answer."""

    async def act(llm: AsyncLLM) -> None:
        abort, scheduler = llm._llm.abort, llm._llm._step_loop._scheduler
        schedule = scheduler.schedule
        readers = [asyncio.create_task(answered(llm, PROMPT, greedy(1000))) for _ in range(3)]
        await answered(llm, PROMPT, greedy(2))

        def failing() -> Any:
            llm._llm.abort = planted  # type: ignore[method-assign]
            raise KeyError("planted")

        scheduler.schedule = failing  # type: ignore[method-assign]
        for error in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(error, KeyError)
        llm._llm.abort, scheduler.schedule = abort, schedule  # type: ignore[method-assign]
        assert len(answer((await answered(llm, PROMPT, greedy(5)))[-1])) == 5
        assert (await llm.stats()).state_blocks["writing"] == 0

    run(model, act)


def test_error_that_cannot_be_copied(model: Path) -> None:
    class TwoPartError(Exception):
        def __init__(self, what: str, why: str) -> None:
            super().__init__(f"{what}: {why}")

    def failing() -> Any:
        raise TwoPartError("planted", "to be seen")

    async def act(llm: AsyncLLM) -> None:
        llm._llm._step_loop._scheduler.schedule = failing  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="TwoPartError: planted: to be seen") as caught:
            await answered(llm, PROMPT)
        assert isinstance(caught.value.__cause__, TwoPartError)

    run(model, act)


def test_last_output_that_cannot_be_given(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = async_llm._snapshot

    def failing(output: RequestOutput) -> RequestOutput:
        if output.finished:
            raise MemoryError("planted")
        return snapshot(output)

    async def act(llm: AsyncLLM) -> None:
        monkeypatch.setattr(async_llm, "_snapshot", failing)
        with pytest.raises(MemoryError, match="planted"):
            await answered(llm, PROMPT, greedy(5))

    run(model, act)


@broken_off
@pytest.mark.parametrize("close", [None, planted])
def test_commands_of_a_thread_that_is_broken_off(model: Path, close: Callable[[], None] | None) -> None:
    """Check that requests in line get the error, even if closing fails."""

    async def act(llm: AsyncLLM) -> None:
        released = threading.Event()

        def leave() -> None:
            released.wait()
            raise SystemExit

        llm._llm.close = close or llm._llm.close  # type: ignore[method-assign]
        llm._commands.put(leave)
        readers = [asyncio.create_task(answered(llm, PROMPT)) for _ in range(2)]
        await asyncio.sleep(0)
        released.set()
        await check_closed(readers, SystemExit)
        await check_closed([asyncio.create_task(answered(llm, PROMPT))], SystemExit)

    run(model, act)


def leaving(*_: Any, **options: Any) -> Any:
    raise SystemExit("planted")


@broken_off
def test_draft_source_that_leaves(model: Path) -> None:
    async def act(llm: AsyncLLM) -> None:
        await check_closed([asyncio.create_task(answered(llm, PROMPT)) for _ in range(3)], SystemExit)

    run(model, act, draft=leaving, max_draft_tokens=2)


def test_tokenizer_that_leaves_costs_its_own_request(model: Path) -> None:
    async def act(llm: AsyncLLM) -> None:
        with patch.object(PreTrainedTokenizerFast, "encode", leaving):
            with pytest.raises(ValueError, match=r"the prompt cannot be encoded .SystemExit: planted.: change it"):
                await answered(llm, "text")
            assert len(answer((await answered(llm, PROMPT, greedy(5)))[-1])) == 5

    run(model, act)


def test_encoding_holds_up_no_step(model: Path) -> None:
    """A prompt that takes long to encode delays neither others nor the end of the engine."""
    begun, released = threading.Event(), threading.Event()
    encode = PreTrainedTokenizerFast.encode

    def encoding(self: Any, text: str, **options: Any) -> list[int]:
        if text == "slow":
            begun.set()
            released.wait()
        return encode(self, text, **options)

    async def act(llm: AsyncLLM) -> None:
        slow = [asyncio.create_task(answered(llm, "slow", greedy(3), f"slow-{i}")) for i in range(3)]
        while not begun.is_set():
            await asyncio.sleep(0.001)
        try:
            assert len(answer((await asyncio.wait_for(answered(llm, PROMPT, greedy(5)), 20))[-1])) == 5
            slow[1].cancel()
            await llm.abort("slow-2")
        finally:
            released.set()
        first, cancelled, aborted = await asyncio.gather(*slow, return_exceptions=True)
        assert len(answer(first[-1])) == 3 and isinstance(cancelled, asyncio.CancelledError)
        assert aborted[-1].outputs[0].finish_reason == "abort"

    with patch.object(PreTrainedTokenizerFast, "encode", encoding):
        run(model, act)


def test_prompts_under_encoding_when_the_engine_closes(model: Path) -> None:
    begun, released = threading.Event(), threading.Event()

    def encoding(self: Any, text: str, **options: Any) -> list[int]:
        begun.set()
        released.wait()
        return [5]

    async def act(llm: AsyncLLM) -> None:
        readers = [asyncio.create_task(answered(llm, "text")) for _ in range(2)]
        while not begun.is_set():
            await asyncio.sleep(0.001)
        await llm.close()
        released.set()
        await check_closed(readers, type(None))

    with patch.object(PreTrainedTokenizerFast, "encode", encoding):
        run(model, act)


def test_calls_out_of_a_tokenizer_are_refused(model: Path) -> None:
    """They would wait for the very thread that waits for them."""

    def encoding(self: Any, text: str, **options: Any) -> list[int]:
        asyncio.run(answered(llms[0], "another text"))
        return [5]

    async def act(llm: AsyncLLM) -> None:
        llms.append(llm)
        with pytest.raises(ValueError, match="its own tokenizer or draft source"):
            await answered(llm, "text")

    llms: list[AsyncLLM] = []
    with patch.object(PreTrainedTokenizerFast, "encode", encoding):
        run(model, act)


@broken_off
def test_abort_that_raises(model: Path) -> None:
    async def act(llm: AsyncLLM) -> None:
        readers = [asyncio.create_task(answered(llm, PROMPT, greedy(1000))) for _ in range(3)]
        stream = llm.generate(PROMPT, greedy(1000))
        await anext(stream)
        llm._llm.abort = planted  # type: ignore[method-assign]
        await stream.aclose()
        await check_closed(readers, LookupError)

    run(model, act)


def test_memory_that_a_failed_device_does_not_give_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error is the one that is seen."""

    def failing() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", failing)
    with pytest.raises(LookupError, match="planted"), LLM(model, **OPTIONS):
        planted()


def test_tokenizer_is_a_copy(model: Path) -> None:
    """Check that changes to the copy do not reach the engine."""

    async def act(llm: AsyncLLM) -> None:
        tokenizer = llm.get_tokenizer()
        assert tokenizer.encode("text") == byte_tokenizer().encode("text")
        tokenizer.encode = tokenizer.decode = planted
        [*_, last] = await answered(llm, "text", greedy(5))
        assert len(answer(last)) == 5 and last.outputs[0].error is None

    run(model, act)


@pytest.mark.parametrize("call", ["stats", "reset_prefix_cache", "close"])
def test_calls_out_of_a_draft_source_are_refused(model: Path, call: str) -> None:
    """They would wait for the very thread that waits for them."""
    said: list[str] = []

    async def act(llm: AsyncLLM) -> None:
        def draft(request: Any, limit: int) -> list[int]:
            try:
                asyncio.run(getattr(llm, call)())
            except RuntimeError as error:
                said.append(str(error))
            return []

        box.append(draft)
        outputs = await asyncio.wait_for(answered(llm, PROMPT), 60)
        assert outputs[-1].finished

    box: list[Callable[[Any, int], list[int]]] = []
    run(model, act, draft=lambda request, limit: box[0](request, limit), max_draft_tokens=2)
    assert said and all("its own tokenizer or draft source" in each for each in said)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes of this kind")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_calls_in_a_forked_process_are_refused(model: Path) -> None:
    """Check the refusal: the engine's thread is in the parent process."""

    async def act(llm: AsyncLLM) -> None:
        if not (child := os.fork()):
            try:
                asyncio.run(answered(llm, PROMPT))
            except RuntimeError as error:
                os._exit(7 if "make an engine after the fork" in str(error) else 1)
            finally:
                os._exit(2)
        status = await asyncio.wait_for(asyncio.to_thread(os.waitpid, child, 0), 60)
        assert os.waitstatus_to_exitcode(status[1]) == 7
        assert (await answered(llm, PROMPT))[-1].finished

    run(model, act)
