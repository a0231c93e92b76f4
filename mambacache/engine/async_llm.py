"""`AsyncLLM`: an engine for asyncio, owned by one thread of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from mambacache.config import SamplingParams
from mambacache.engine.llm import LLM
from mambacache.engine.options import Options
from mambacache.engine.outputs import RequestOutput
from mambacache.engine.prompts import Prompt
from mambacache.report import CacheStats
from mambacache.scheduler.drafts import DraftSource

CLOSED = "this AsyncLLM is closed: make a new one"

T = TypeVar("T")


@dataclass(eq=False)
class _Consumer:
    """Who reads the outputs of one request, or the error that ends them."""

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)
    request_id: str | None = None  # once it is in line

    def give(self, item: RequestOutput | Exception) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody reads
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, item)


class AsyncLLM:
    """Answers any number of prompts at once, each as its own stream.

    One thread owns the `LLM` and runs steps while there is work. Loading blocks the caller. Use it as an asynchronous
    context manager, or await `close`.

    Args:
        model, draft, options: as of `LLM`, which raises the same errors.
    """

    def __init__(self, model: str | Path, *, draft: DraftSource | None = None, **options: Unpack[Options]) -> None:
        self._llm = LLM(model, draft=draft, **options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: close
        self._consumers: dict[str, _Consumer] = {}  # by the id of their request; the thread's own
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="mambacache", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Answers one prompt, with an output of its own after each step that added to it; `delta` is the new text.

        Whoever stops reading, or is cancelled, aborts the request.

        Raises:
            ValueError: see `LLM.submit`.
            RuntimeError: the engine is closed, or was while the answer went on; or the device has failed.
            Exception: from a step that failed as a whole.
        """
        consumer = _Consumer(asyncio.get_running_loop())
        self._tell(lambda: self._submit(consumer, prompt, sampling_params, request_id))
        try:
            while True:
                output = await consumer.outputs.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            with suppress(RuntimeError):  # closed: its request has ended
                self._tell(lambda: self._abort(consumer))

    async def stats(self) -> CacheStats:
        """As of `LLM.stats`."""
        return await self._ask(lambda: self._llm.stats)

    async def reset_prefix_cache(self) -> None:
        """As of `LLM.reset_prefix_cache`."""
        await self._ask(self._llm.reset_prefix_cache)

    def get_tokenizer(self) -> Any:
        """As of `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    async def close(self) -> None:
        """Ends all requests, whose readers get a RuntimeError, and the thread; gives the memory back."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _tell(self, command: Callable[[], None]) -> None:
        with self._lock:  # nothing comes after the command that closes
            if self._closed:
                raise RuntimeError(CLOSED)
            self._commands.put(command)

    async def _ask(self, call: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)

        self._tell(answer)
        return await asyncio.wrap_future(future)

    # --- in the thread ---

    def _work(self) -> None:
        try:
            while self._run_commands():
                self._step()
        finally:
            with self._lock:
                self._closed = True
            self._end_all(RuntimeError(CLOSED))
            self._llm.close()
            while not self._commands.empty():  # only where the thread was broken off: each is told that it is closed
                if (command := self._commands.get()) is not None:
                    command()

    def _run_commands(self) -> bool:
        """Does what was asked for, and waits for more while there is no request; False when it is to close."""
        while True:
            try:
                command = self._commands.get(block=self._llm.idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _step(self) -> None:
        try:
            for output in self._llm.step():
                consumer = self._consumers[output.request_id]
                if output.finished:
                    del self._consumers[output.request_id]
                consumer.give(_snapshot(output))
        except Exception as error:
            self._end_all(error)

    def _submit(
        self, consumer: _Consumer, prompt: Prompt, params: SamplingParams | None, request_id: str | None
    ) -> None:
        try:
            consumer.request_id = self._llm.submit(prompt, params, request_id)
        except Exception as error:
            consumer.give(error)
        else:
            self._consumers[consumer.request_id] = consumer

    def _abort(self, consumer: _Consumer) -> None:
        request_id = consumer.request_id
        if request_id is not None and self._consumers.get(request_id) is consumer:  # else it has ended
            del self._consumers[request_id]
            self._llm.abort(request_id)

    def _end_all(self, error: Exception) -> None:
        for consumer in list(self._consumers.values()):
            self._abort(consumer)
            consumer.give(error)


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy for another thread: the engine goes on to change its own."""
    outputs = [
        replace(each, token_ids=list(each.token_ids), logprobs=None if each.logprobs is None else list(each.logprobs))
        for each in output.outputs
    ]
    prompt_logprobs = None if output.prompt_logprobs is None else list(output.prompt_logprobs)
    return replace(output, outputs=outputs, metrics=replace(output.metrics), prompt_logprobs=prompt_logprobs)
