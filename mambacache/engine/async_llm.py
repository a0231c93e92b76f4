"""Serve asyncio callers with an engine in a thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from mambacache.config import SamplingParams
from mambacache.engine.llm import LLM
from mambacache.engine.options import Options
from mambacache.engine.outputs import RequestOutput
from mambacache.engine.prompts import Encoded, Messages, Prompt
from mambacache.report import CacheStats
from mambacache.scheduler.drafts import DraftFunction

CLOSED = "this AsyncLLM is closed: make a new one"
INSIDE = "this AsyncLLM waits for its own tokenizer or draft source, which cannot wait for it: call it from elsewhere"
GONE = "the thread of this AsyncLLM is not in this process: make an engine after the fork"

T = TypeVar("T")


@dataclass(eq=False)
class _Consumer:
    loop: asyncio.AbstractEventLoop
    request_id: str | None
    aborted: bool = False
    _output: RequestOutput | None = None
    _error: Exception | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def give(self, item: RequestOutput | Exception) -> bool:
        """Leave an output or error; False if the event loop is closed."""
        with self._lock:
            wakes = self._output is None and self._error is None
            if isinstance(item, Exception):
                self._error = item
            else:
                self._output = item if self._output is None else _joined(self._output, item)
        if wakes:
            with suppress(RuntimeError):  # closed
                self.loop.call_soon_threadsafe(self._news.set)
        return not self.loop.is_closed()

    async def take(self) -> RequestOutput:
        await self._news.wait()
        with self._lock:
            output, self._output = self._output, None
            if self._error is None:
                self._news.clear()
        if output is None:
            assert self._error is not None, "news without an output or error"
            raise self._error
        return output


class AsyncLLM:
    """Answer many prompts at once, each as a stream; see `LLM` for arguments and errors.

    A thread owns the `LLM`, and another encodes texts. Use `async with`, or await `close`.
    """

    def __init__(self, model: str | Path, *, draft: DraftFunction | None = None, **options: Unpack[Options]) -> None:
        self._llm = LLM(model, draft=draft, **options)
        # Copy before the thread starts.
        self._tokenizer = deepcopy(self._llm.get_tokenizer())
        self._encoder = replace(self._llm.encoder, tokenizer=deepcopy(self._llm.get_tokenizer()))
        self._own_threads: set[threading.Thread] = set()
        self._texts = ThreadPoolExecutor(1, "mambacache texts", self._note_thread)
        self._coming: set[_Consumer] = set()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None closes
        self._consumers: dict[str, _Consumer] = {}  # the thread's own
        self._lock = threading.Lock()
        self._closed = False
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="mambacache", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Answer a prompt; yield an output after each step that adds to it.

        A slow reader gets several steps as one output. The request is aborted if its reader stops or is cancelled.
        After a close, `__cause__` of the RuntimeError tells the reason. A failed step may raise its error.
        """
        in_line = self._texts if _is_text(prompt) else None
        return self._answers(lambda: self._encoder(prompt, sampling_params), in_line, request_id)

    stream = generate

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer a conversation; see `generate` and `LLM.chat`."""

        def encode() -> Encoded:
            [prompt] = self._encoder.render([messages], **template_options)
            return self._encoder(prompt, sampling_params)

        return self._answers(encode, self._texts, request_id)

    async def abort(self, request_id: str) -> None:
        """End a request with a last output; ignore an unknown id."""
        await self._ask(lambda: self._end(request_id))

    async def stats(self) -> CacheStats:
        """Return `LLM.stats`."""
        return await self._ask(lambda: self._llm.stats)

    async def reset_prefix_cache(self) -> None:
        """Call `LLM.reset_prefix_cache`."""
        await self._ask(self._llm.reset_prefix_cache)

    def get_tokenizer(self) -> Any:
        """Return a copy of the tokenizer."""
        return self._tokenizer

    async def close(self) -> None:
        """End all requests with a RuntimeError, and free the memory."""
        self._check_thread()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def _answers(
        self, encode: Callable[[], Encoded], in_line: ThreadPoolExecutor | None, request_id: str | None
    ) -> AsyncGenerator[RequestOutput]:
        consumer = _Consumer(asyncio.get_running_loop(), request_id)
        try:
            encoded = await self._encoded(consumer, encode, in_line)
            self._tell(lambda: self._submit(consumer, encoded))
            while True:
                output = await consumer.take()
                yield output
                if output.finished:
                    return
        finally:
            self._coming.discard(consumer)
            with suppress(RuntimeError):  # closed
                self._tell(lambda: self._abort(consumer))

    async def _encoded(
        self, consumer: _Consumer, encode: Callable[[], Encoded], in_line: ThreadPoolExecutor | None
    ) -> Encoded:
        self._check_thread()
        with self._lock:
            self._check_open()
            self._coming.add(consumer)
            future = consumer.loop.run_in_executor(in_line, self._encode, encode)
        return await future

    def _encode(self, encode: Callable[[], Encoded]) -> Encoded:
        if self._closed:
            raise self._closed_error()
        try:
            return encode()
        except Exception:
            raise
        except BaseException as error:  # would end the event loop
            raise ValueError(
                f"the prompt cannot be encoded ({type(error).__name__}: {error}): change it, or give token ids"
            ) from error

    def _tell(self, command: Callable[[], None]) -> None:
        self._check_thread()
        with self._lock:  # the close stays the last command
            self._check_open()
            self._commands.put(command)

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()
        if not self._thread.is_alive():
            raise RuntimeError(GONE)

    def _check_thread(self) -> None:
        """Raise in own threads, which would wait for themselves."""
        if threading.current_thread() in self._own_threads:
            raise RuntimeError(INSIDE)

    def _note_thread(self) -> None:
        self._own_threads.add(threading.current_thread())

    def _closed_error(self) -> RuntimeError:
        error = RuntimeError(CLOSED)
        error.__cause__ = self._cause
        return error

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

    # --- thread ---

    def _work(self) -> None:
        self._note_thread()
        try:
            while self._run_commands():
                self._step()
        except BaseException as error:
            self._cause = error
            raise
        finally:
            with self._lock:
                self._closed = True
            self._texts.shutdown(wait=False)
            try:
                self._end_all(self._closed_error)
                self._llm.close()
            finally:
                while not self._commands.empty():  # tell each caller of the close
                    if (command := self._commands.get()) is not None:
                        command()

    def _run_commands(self) -> bool:
        """Run commands, and wait without requests; False to close."""
        while True:
            try:
                command = self._commands.get(block=self._llm.idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _step(self) -> None:
        unread = []
        try:
            for output in self._llm.step():
                consumer = self._consumers.get(output.request_id)
                if consumer is None or not consumer.give(_snapshot(output)):  # None: its abort failed
                    unread.append(output.request_id)
                elif output.finished:
                    del self._consumers[output.request_id]
        except Exception as error:
            self._end_all(partial(_own, error))
        for request_id in unread:
            self._consumers.pop(request_id, None)
            self._llm.abort(request_id)

    def _submit(self, consumer: _Consumer, encoded: Encoded) -> None:
        self._coming.discard(consumer)
        try:
            if self._closed:  # the engine is open if its close failed
                raise self._closed_error()
            consumer.request_id = self._llm.submit(encoded, request_id=consumer.request_id)
        except Exception as error:
            consumer.give(error)
        except BaseException as error:  # ends the thread, so tell this reader
            self._cause = error
            consumer.give(self._closed_error())
            raise
        else:
            self._consumers[consumer.request_id] = consumer
            if consumer.aborted:
                self._end(consumer.request_id)

    def _abort(self, consumer: _Consumer) -> None:
        request_id = consumer.request_id
        if request_id is not None and self._consumers.get(request_id) is consumer:
            del self._consumers[request_id]
            self._llm.abort(request_id)

    def _end(self, request_id: str) -> None:
        for coming in list(self._coming):
            coming.aborted |= coming.request_id == request_id
        consumer = self._consumers.get(request_id)
        if consumer is not None:
            answers = self._llm._step_loop.answers[request_id]
            self._llm.abort(request_id)
            del self._consumers[request_id]
            consumer.give(_snapshot(answers.hand_out()))

    def _end_all(self, make_error: Callable[[], Exception]) -> None:
        """Give each reader an error before an abort can fail."""
        ended, self._consumers = self._consumers, {}
        for consumer in ended.values():
            consumer.give(make_error())
        for request_id in ended:
            with suppress(Exception):
                self._llm.abort(request_id)


def _is_text(prompt: Prompt) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt)


def _own(error: Exception) -> Exception:
    """Copy an error, as each raise changes its traceback."""
    try:
        own = copy(error)
    except Exception:
        own = RuntimeError(f"{type(error).__name__}: {error}")
    own.__cause__ = error
    return own


def _joined(unread: RequestOutput, newer: RequestOutput) -> RequestOutput:
    for before, completion in zip(unread.outputs, newer.outputs, strict=True):
        completion.delta = before.delta + completion.delta
    return newer


def _snapshot(output: RequestOutput) -> RequestOutput:
    outputs = [
        replace(each, token_ids=list(each.token_ids), logprobs=None if each.logprobs is None else list(each.logprobs))
        for each in output.outputs
    ]
    prompt_logprobs = None if output.prompt_logprobs is None else list(output.prompt_logprobs)
    return replace(output, outputs=outputs, metrics=replace(output.metrics), prompt_logprobs=prompt_logprobs)
