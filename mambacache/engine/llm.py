"""`LLM`: a model, its caches and a scheduler, on one device."""

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
"""What the ids look like that requests get which bring none, and their further answers."""


class LLM:
    """Generates text with a Hugging Face checkpoint; prompts that begin alike are computed once.

    It takes one caller at a time: a call from a second thread, or out of a tokenizer or a draft source while another
    call is under way, raises a RuntimeError at once and disturbs nothing. Streams that take turns are no such calls.
    Ctrl-C ends a call after the step that runs, and a second Ctrl-C closes the engine. A host's own handler stays.
    As a context manager it closes itself. Python's garbage collector leaves out from then on what was there when one is
    made (`gc.freeze`), as modules: going through that held up steps.

    Args:
        model: directory of a checkpoint, or a Hub id.
        draft: proposes tokens that may follow a request's known ones, or a `DraftTree` of them, to be verified in one
            step; needs `max_draft_tokens`.
        options: see `EngineConfig`; and those of vLLM that change nothing here, as `tensor_parallel_size=1`.

    Raises:
        TypeError: an unknown option.
        ValueError: an option's value, the model's type or its weights cannot work; the message says what to change.
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
        """Ends all requests with "abort" and gives the memory of model and pools back. Later calls but this one raise a
        RuntimeError.

        Raises:
            RuntimeError: another call is inside this engine.
        """
        try:
            if not self._step_loop.closed:
                self._close()
        finally:  # files may take a while to be written, and be interrupted
            vars(self).pop("runner", None)
        with suppress(RuntimeError):  # of a device that has failed: whoever closes may be handling that error
            torch.cuda.empty_cache()

    @alone
    def _close(self) -> None:
        self._step_loop.close()

    def get_tokenizer(self) -> Any:
        """The tokenizer, of transformers; None where the checkpoint has none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """How prompts are sampled that come without parameters: as the checkpoint's generation_config.json says."""
        return self.encoder.default

    # --- one call for all ---

    @alone
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers prompts, in their order.

        Args:
            prompts: one, or a list of them: texts, token ids, {"prompt": text}, {"prompt_token_ids": token ids}, or
                what `encoder` gave.
            sampling_params: for all, or one for each prompt; None for `get_default_sampling_params`.

        Raises:
            ValueError: see `submit`; nothing is generated then, and the message says which prompt it is.
            RuntimeError: see `submit`; or nothing can run although requests are left.
        """
        every, names = listed(prompts)
        each = sampling_params if isinstance(sampling_params, list | tuple) else [sampling_params] * len(every)
        if len(each) != len(every):
            raise ValueError(f"{len(every)} prompts came with {len(each)} sampling_params: give one, or one for each")
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
        """Answers conversations (lists of {"role", "content"}), rendered by the tokenizer's chat template.

        Warns when the template renders earlier turns otherwise than when they were answered: their states are then of
        no use, however much is cached.

        Raises:
            ValueError, RuntimeError: see `generate`; or there is no chat template, or it fails, and the message says
                for which conversation.
        """
        if not isinstance(messages, list | tuple):
            raise ValueError(f"messages is {messages!r}: give a list of messages, or a list of such lists")
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Sequence[Messages] = [messages] if single else messages
        prompts = self.encoder.render(conversations, **template_options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answers one prompt, with an output after each step that added to it; `delta` is the new text.

        Several streams may take turns, and other requests be run meanwhile: every step brings on all of them. The
        stream ends early if its request is aborted.
        """
        asked: list[Answers] = []
        try:
            self._begin(asked, prompt, sampling_params)
            while (output := self._next_output(asked[0])) is not None:
                yield output
        finally:
            self._step_loop.abandoned.extend(asked)
            with suppress(RuntimeError):  # a collector may close a stream in the midst of a call, which ends it then
                self._tidy()

    # --- step by step ---

    @alone
    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Puts a prompt in line; gives the id under which `step` reports it.

        Raises:
            ValueError: the prompt has none of the forms that `generate` takes, is empty, too long for the model or the
                KV pool, or holds tokens out of the vocabulary; or text is wanted and there is no tokenizer.
            RuntimeError: the device has failed; or another call is inside this engine.
        """
        answers = self._prepare(prompt, sampling_params, "the prompt", request_id)
        self._step_loop.add(answers)
        return answers.request_id

    @alone
    def step(self) -> list[RequestOutput]:
        """Takes the tokens of one step; on a GPU the next one runs by then.

        Returns:
            The outputs that have grown or ended since they were last given, the same objects each time, brought up to
            date. There may be none although requests are under way: `idle` tells when all have ended.

        Raises:
            RuntimeError: the device has failed; nothing can run although requests are left; or another call is inside
                this engine.
        """
        self._step_loop.advance()
        return self._step_loop.give()

    @property
    def idle(self) -> bool:
        """Whether every request has ended and its output was given."""
        return self._step_loop.idle

    @alone
    def abort(self, request_id: str) -> None:
        """Ends a request; what it committed stays cached. An unknown id is ignored: it may have ended."""
        answers = self._step_loop.answers.get(request_id)
        if answers is not None:
            self._step_loop.abandoned.append(answers)

    @alone
    def reset_prefix_cache(self) -> None:
        """Drop all cached states and pages, as after a change of weights. Running requests keep theirs.

        Weights must change in place: CUDA graphs hold their addresses.
        """
        self.cache.reset()

    @property
    def stats(self) -> CacheStats:
        """Totals of hits, losses by reason, and blocks, since the engine was made; it prints as a table."""
        return self.cache.stats

    # --- inside ---

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, name: str, request_id: str | None = None
    ) -> Answers:
        """The answers that a prompt asks for; they are not in line yet."""
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
        """A request's id: the caller's, or one of our own that no caller has given before."""
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
        """Does what every call begins and ends with."""
