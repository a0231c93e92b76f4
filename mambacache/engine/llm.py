"""Generate text with a model on one device."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from tqdm import tqdm

from mambacache.config import SamplingParams
from mambacache.engine.answers import Answers
from mambacache.engine.options import Options, engine_config
from mambacache.engine.outputs import RequestOutput
from mambacache.engine.parts import build
from mambacache.engine.prompts import Encoder, Messages, Prompt, listed
from mambacache.engine.step_loop import alone
from mambacache.report import CacheStats
from mambacache.scheduler.drafts import DraftFunction

OWN_ID = re.compile(r"request-(\d{1,18})(?:/|$)")
"""Ids that the engine gives to requests."""


class LLM:
    """Generate text with a Hugging Face checkpoint, computing shared prefixes once.

    Ctrl-C ends a call after the running step, and a second Ctrl-C closes the engine, unless the host has its own
    handler. Construction calls `gc.freeze`.

    Methods raise ValueError for an argument, and RuntimeError during another call, on a closed engine or a failed
    device, before anything has changed; or RuntimeError if nothing can run. Streams may take turns.

    Args:
        draft: function of a request and a limit, which returns its next token ids or a `DraftTree`; needs
            `max_draft_tokens`.
        options: see `EngineConfig`. Options of vLLM, as `swap_space`, log a warning.

    Raises:
        TypeError: an option is unknown.
        ValueError: a value, the model's type or its weights cannot work.
    """

    def __init__(self, model: str | Path, *, draft: DraftFunction | None = None, **options: Unpack[Options]) -> None:
        self.config = engine_config(model, options)
        parts = build(self.config, draft)
        self.sizes, self.cache, self.runner = parts.sizes, parts.cache, parts.runner
        self._step_loop, self.tokenizer = parts.step_loop, parts.tokenizer
        self._end_tokens = parts.end_tokens
        caches = self.config.enable_prefix_caching
        self.encoder = Encoder(parts.limits, self.tokenizer, parts.default_sampling, caches)
        self._next_id = 0
        self._rng = random.Random(self.config.seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests with "abort", and free the memory."""
        try:
            if not self._step_loop.closed:
                self._close()
        finally:
            vars(self).pop("runner", None)
        with suppress(RuntimeError):  # a failed device
            torch.cuda.empty_cache()

    @alone
    def _close(self) -> None:
        self._step_loop.close()

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, if any."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of generation_config.json."""
        return self.encoder.default

    @alone
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, in their order.

        Args:
            prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": token ids} or `Encoded`; or a list.
            sampling_params: for all prompts, or a list; None for `get_default_sampling_params`.
        """
        every, names = listed(prompts)
        each = sampling_params if isinstance(sampling_params, list | tuple) else [sampling_params] * len(every)
        if len(each) != len(every):
            raise ValueError(
                f"{len(every)} prompts came with {len(each)} sampling_params: give SamplingParams, or a list"
            )
        asked = [self._prepare(*of_one) for of_one in zip(every, each, names, strict=True)]
        try:
            for answers in asked:
                self._step_loop.add(answers)
            return self._run(asked, use_tqdm)
        finally:
            self._step_loop.abandoned.extend(asked)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations (lists of {"role", "content"}) by the tokenizer's chat template.

        Warn if the template rewrites earlier turns, which prevents prefix hits.
        """
        if not isinstance(messages, list | tuple):
            raise ValueError(f"messages is {messages!r}: give a list of messages, or a list of such lists")
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Sequence[Messages] = [messages] if single else messages
        prompts = self.encoder.render(conversations, **template_options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer a prompt; yield an output after each step that adds to it. Every step advances all requests."""
        asked: list[Answers] = []
        try:
            self._begin(asked, prompt, sampling_params)
            while (output := self._next_output(asked[0])) is not None:
                yield output
        finally:
            self._step_loop.abandoned.extend(asked)
            with suppress(RuntimeError):  # a garbage collection during a call
                self._tidy()

    @alone
    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Put a prompt in line, and return the id of its outputs."""
        answers = self._prepare(prompt, sampling_params, "the prompt", request_id)
        self._step_loop.add(answers)
        return answers.request_id

    @alone
    def step(self) -> list[RequestOutput]:
        """Take the tokens of one step; return the outputs that grew or ended, an object for each request."""
        self._step_loop.advance()
        return self._step_loop.give()

    @property
    def idle(self) -> bool:
        """Tell whether all requests ended and were given."""
        return self._step_loop.idle

    @alone
    def abort(self, request_id: str) -> None:
        """End a request; ignore an unknown id."""
        answers = self._step_loop.answers.get(request_id)
        if answers is not None:
            self._step_loop.abandoned.append(answers)

    @alone
    def reset_prefix_cache(self) -> None:
        """Drop all cached blocks. Change weights in place: CUDA graphs hold addresses."""
        self.cache.reset()

    @property
    def stats(self) -> CacheStats:
        """Return the cache's totals."""
        return self.cache.stats

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, name: str, request_id: str | None = None
    ) -> Answers:
        self._step_loop.interrupts.check()
        encoded = self.encoder(prompt, params, name)
        seed = self._rng.getrandbits(63) if encoded.params.seed is None else encoded.params.seed
        answers = Answers(
            self._id(request_id),
            encoded.tokens,
            encoded.params,
            self._end_tokens,
            self.tokenizer,
            seed,
            encoded.text,
        )
        if any(request.request_id in self._step_loop.answers for request in answers.requests):
            raise ValueError(f"request id {request_id!r} is in use: choose another")
        return answers

    def _id(self, given: str | None) -> str:
        if given is None:
            self._next_id += 1
            return f"request-{self._next_id - 1}"
        if not isinstance(given, str):
            raise ValueError(f"request_id is {given!r}: give a string")
        if (like_ours := OWN_ID.match(given)) is not None:
            self._next_id = max(self._next_id, int(like_ours[1]) + 1)
        return given

    def _run(self, asked: Sequence[Answers], use_tqdm: bool) -> list[RequestOutput]:
        left = {answers.request_id for answers in asked}
        began, tokens, prompt_tokens, hit_tokens = time.perf_counter(), 0, 0, 0
        with tqdm(total=len(left), desc="prompts", disable=not use_tqdm) as bar:
            while left:
                self._step_loop.advance()
                ended = [a for a in self._step_loop.touched.values() if a.output.finished and a.request_id in left]
                for answers in ended:
                    self._step_loop.hand_out(answers)
                    left.remove(answers.request_id)
                    tokens += sum(len(completion.token_ids) for completion in answers.output.outputs)
                    if (cache := answers.output.cache) is not None:
                        prompt_tokens, hit_tokens = prompt_tokens + cache.prompt, hit_tokens + cache.hit
                    rate, share = tokens / (time.perf_counter() - began), hit_tokens / max(prompt_tokens, 1)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s, {share:.0%} of prompts hit", refresh=False)
                    bar.update()
        return [answers.output for answers in asked]

    @alone
    def _begin(self, asked: list[Answers], prompt: Prompt, params: SamplingParams | None) -> None:
        asked.append(self._prepare(prompt, params, "the prompt"))
        self._step_loop.add(asked[0])

    @alone
    def _next_output(self, answers: Answers) -> RequestOutput | None:
        return self._step_loop.next_output(answers)

    @alone
    def _tidy(self) -> None:
        """Let `alone` abort abandoned requests."""
