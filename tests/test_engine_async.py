"""Check `AsyncLLM` with many streams at once. Each gets the answer that it gets alone, even if others fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine_driver import answer, byte_tokenizer, floor, greedy, tokens_of
from mambacache import LLM, AsyncLLM, RequestOutput, SamplingParams
from selection import some

SMALL: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_bytes": 8 << 20,
    "checkpoint_budget_bytes": 4 << 20,
    "max_num_seqs": 8,
    "seed": 0,
}
SHARED = tokens_of(0, 130)
PROMPTS = [[*(SHARED if i % 2 else SHARED[:70]), *tokens_of(i, 5 + i)] for i in range(20)]
PARAMS = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=8 + i, ignore_eos=True) for i in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engine_driver import save_text_model

    return save_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LLM(model, **SMALL) as llm:
        return [answer(output) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def run(model: Path, act: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    """Run a test with an engine, and check that nothing is left in its records and that its thread has ended."""

    async def main() -> None:
        async with AsyncLLM(model, **SMALL) as llm:
            await act(llm)
            stats = await llm.stats()
            assert stats.state_blocks["writing"] == stats.kv_blocks["writing"] == 0
            assert llm._llm.idle and not llm._consumers and not llm._coming
        assert not llm._thread.is_alive()
        with pytest.raises(RuntimeError, match="this AsyncLLM is closed: make a new one"):
            await last(llm, PROMPTS[0], PARAMS[0])
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), 120))


async def last(llm: AsyncLLM, *args: Any) -> RequestOutput:
    """The last output, and that the others led to it."""
    text, count = "", 0
    async for output in llm.generate(*args):
        text += output.outputs[0].delta
        assert output.outputs[0].text == text and len(answer(output)) > count - output.finished
        count = len(answer(output))
    assert output.finished
    return output


def test_streams_at_once(model: Path, expected: list[list[int]]) -> None:
    async def act(llm: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(last(llm, *each) for each in zip(PROMPTS, PARAMS, strict=True)))
        assert [answer(output) for output in outputs] == expected
        assert sum(output.num_cached_tokens or 0 for output in outputs) >= 12 * floor(70)
        assert len({output.request_id for output in outputs}) == 20
        assert (await llm.stats()).requests == 20
        assert llm.get_tokenizer().decode(expected[0]) == outputs[0].outputs[0].text

    run(model, act)


@pytest.mark.parametrize("seed", some(1, range(3)))
def test_cancelled_at_random(model: Path, expected: list[list[int]], seed: int) -> None:
    """By a task's cancellation, or by a reader who stops; the others are answered as ever."""
    rng = random.Random(seed)
    leaving = rng.sample(range(20), 8)

    async def leave(llm: AsyncLLM, i: int, after: int) -> None:
        async for output in llm.generate(PROMPTS[i], PARAMS[i]):
            if len(answer(output)) >= after:
                break

    async def act(llm: AsyncLLM) -> None:
        tasks: dict[int, asyncio.Task[Any]] = {}
        for i in range(20):
            quits = i in leaving[:4]
            job = leave(llm, i, rng.randint(1, 6)) if quits else last(llm, PROMPTS[i], PARAMS[i])
            tasks[i] = asyncio.create_task(job)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() / 50)
        for i in leaving[4:]:
            await asyncio.sleep(rng.random() / 20)
            tasks[i].cancel()
        for i, task in tasks.items():
            if i not in leaving:
                assert answer(await task) == expected[i]
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        await asyncio.sleep(0.1)  # generators that were left are closed by the loop
        await llm.reset_prefix_cache()

    run(model, act)


def test_closed_in_mid_stream(model: Path) -> None:
    """Check that all readers are told that the engine is closed."""

    async def main() -> None:
        llm = AsyncLLM(model, **SMALL)
        readers = [asyncio.create_task(last(llm, PROMPTS[i], greedy(500))) for i in range(12)]
        async for _ in llm.generate(PROMPTS[0], greedy(3)):
            pass
        await asyncio.gather(llm.close(), llm.close())
        for error in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(error, RuntimeError) and "is closed: make a new one" in str(error)
        assert not llm._thread.is_alive()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_errors_of_one_request(model: Path, expected: list[list[int]]) -> None:
    """Check that a wrong prompt, id or token concerns no other request."""

    async def act(llm: AsyncLLM) -> None:
        encodes, tokenizer = llm._encoder.tokenizer, llm._llm.get_tokenizer()
        encode, decode = encodes.encode, tokenizer.decode
        bad = byte_tokenizer().encode("!")[0]

        def encoding(text: str, **options: Any) -> list[int]:
            if text == "bad":
                raise KeyError("planted")
            return encode(text, **options)

        def decoding(tokens: list[int], **options: Any) -> str:
            if bad in tokens:
                raise KeyError("planted")
            return decode(tokens, **options)

        encodes.encode, tokenizer.decode = encoding, decoding
        others = [asyncio.create_task(last(llm, PROMPTS[i], PARAMS[i], f"mine-{i}")) for i in range(6)]
        await asyncio.sleep(0)
        for prompt, params, request_id, message in (
            ("bad", None, None, "the prompt cannot be encoded by the tokenizer .KeyError: 'planted'.: change it"),
            ([], None, None, "the prompt is empty"),
            (PROMPTS[0], {"n": 1}, None, "give SamplingParams"),
            (PROMPTS[0], None, "mine-5", "request id 'mine-5' is in use"),
        ):
            with pytest.raises(ValueError, match=message):
                await last(llm, prompt, params, request_id)
        biased = SamplingParams(temperature=0, logit_bias={bad: 100}, max_tokens=5)
        assert (await last(llm, "ok", biased)).outputs[0].error == "KeyError: 'planted'"
        for i, other in enumerate(others):
            output = await other
            if bad not in expected[i]:
                assert (answer(output), output.request_id) == (expected[i], f"mine-{i}")

    run(model, act)


def test_step_that_raises(model: Path, expected: list[list[int]]) -> None:
    """Check that all readers get the error, and that a later request is answered."""

    async def act(llm: AsyncLLM) -> None:
        scheduler = llm._llm._step_loop._scheduler
        schedule = scheduler.schedule
        readers = [asyncio.create_task(last(llm, PROMPTS[i], greedy(300))) for i in range(6)]
        async for _ in llm.generate(PROMPTS[0], greedy(2)):
            pass

        def failing() -> Any:
            raise LookupError("planted")

        scheduler.schedule = failing  # type: ignore[method-assign]
        errors = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(error, LookupError) and str(error) == "planted" for error in errors)
        assert len(set(map(id, errors))) == 6
        scheduler.schedule = schedule  # type: ignore[method-assign]
        assert answer(await last(llm, PROMPTS[1], PARAMS[1])) == expected[1]

    run(model, act)


def test_conversations_at_once(model: Path) -> None:
    """Each is answered as `LLM.chat` answers it."""
    conversations = [[{"role": "user", "content": text * 30}] for text in ("one ", "two ")]
    with LLM(model, **SMALL) as llm:
        expected = [answer(output) for output in llm.chat(conversations, greedy(6), use_tqdm=False)]

    async def act(llm: AsyncLLM) -> None:
        streams = [llm.chat(messages, greedy(6)) for messages in conversations]
        ends = await asyncio.gather(*map(end_of, streams))
        assert [answer(output) for output in ends] == expected
        assert ends[0].prompt == "<user>" + "one " * 30 + "</><assistant>"
        with pytest.raises(ValueError, match="give a list of messages"):
            await end_of(llm.chat(["text"]))  # type: ignore[list-item]
        with pytest.raises(ValueError, match="UndefinedError"):
            await end_of(llm.chat(conversations[0], chat_template="{{ nothing.at_all }}"))
        assert answer(await end_of(llm.stream(PROMPTS[0], PARAMS[0]))) == answer(await last(llm, PROMPTS[0], PARAMS[0]))

    run(model, act)


async def end_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def test_an_aborted_request_ends_with_its_tokens_so_far(model: Path, expected: list[list[int]]) -> None:
    """Check that its reader is told, and that the others are answered as ever."""

    async def act(llm: AsyncLLM) -> None:
        others = [asyncio.create_task(last(llm, PROMPTS[i], PARAMS[i])) for i in range(6)]
        text, outputs = "", []
        async for output in llm.generate(PROMPTS[7], greedy(5000), "mine"):
            outputs.append(output)
            text += output.outputs[0].delta
            if len(answer(output)) >= 5 and not output.finished:
                await llm.abort("mine")
        assert output.outputs[0].finish_reason == "abort" and 5 <= len(answer(output)) < 5000
        assert text == output.outputs[0].text and output.finished
        await llm.abort("mine")
        await llm.abort("nobody's")
        assert [answer(await other) for other in others] == expected[:6]
        assert len(answer(await last(llm, PROMPTS[7], greedy(3), "mine"))) == 3

    run(model, act)
