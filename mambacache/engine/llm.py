"""`LLM`: a model, its caches and a scheduler, on one device."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig, EngineConfig, SamplingParams
from mambacache.engine.answers import Answers
from mambacache.engine.checkpoint import end_tokens, load_tokenizer
from mambacache.engine.outputs import RequestOutput
from mambacache.engine.prompts import Limits, Prompt, listed
from mambacache.engine.stepper import Stepper, alone
from mambacache.engine.text import render_chat, rewritten_turns
from mambacache.kernels import StatePool
from mambacache.models.adapt import load_model
from mambacache.report import CacheStats
from mambacache.runner.kv_pages import allocate_kv_pages
from mambacache.runner.model_runner import ModelRunner
from mambacache.runner.sizing import free_memory, plan_memory, present_device
from mambacache.scheduler.drafts import DraftSource
from mambacache.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

Messages = Sequence[dict[str, Any]]


class LLM:
    """Generates text with a Hugging Face checkpoint; prompts that begin alike are computed once.

    It takes one caller at a time: a call from a second thread, or out of a tokenizer or a draft source while another
    call is under way, raises a RuntimeError at once and disturbs nothing. Streams that take turns are no such calls.

    Args:
        model: directory of a checkpoint, or a Hub id.
        draft: proposes tokens that may follow a request's known ones, to be verified in one step; needs
            `max_draft_tokens`.
        options: see `EngineConfig`.

    Raises:
        TypeError: an unknown option.
        ValueError: an option's value, the model's type or its weights cannot work; the message says what to change.
    """

    def __init__(self, model: str | Path, *, draft: DraftSource | None = None, **options: Any) -> None:
        known = [option.name for option in fields(EngineConfig)]
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            raise TypeError(f"LLM has no option {unknown!r}: choose from {', '.join(known[1:])}")
        if draft is not None and not callable(draft):
            raise ValueError(f"draft is {draft!r}: give a function of a request and a number of tokens")
        self.config = EngineConfig(model, **options)
        device = present_device(self.config.device)
        loaded = load_model(model, self.config.dtype, device)
        self.sizes = plan_memory(self.config, loaded, free_memory(device))
        layers = loaded.state_layers(getattr(torch, self.config.state_dtype), self.config.max_draft_tokens)
        self.cache = PrefixCache(
            CacheConfig(
                num_state_blocks=self.sizes.num_state_blocks,
                num_kv_blocks=self.sizes.num_kv_blocks,
                block_size=self.config.block_size,
                max_draft_tokens=self.config.max_draft_tokens,
                model_key=f"{model} {self.config.state_dtype}",
                has_attention=bool(loaded.kv_layers),
                max_checkpoints=self.sizes.max_checkpoints,
                checkpoint_interval=self.config.checkpoint_interval,
                strict_reuse=self.config.strict_reuse,
            )
        )
        self.runner = ModelRunner(
            loaded,
            StatePool(layers, self.sizes.num_state_blocks, device),
            allocate_kv_pages(loaded.kv_layers, self.sizes.num_kv_blocks, self.config.block_size, device),
        )
        aligned = self.sizes.max_num_seqs + self.config.block_size
        if self.config.max_num_batched_tokens < aligned:
            logger.warning(
                "max_num_batched_tokens is %d: with %d requests at a time prompts may be cut inside blocks, set it to "
                "%d or more",
                self.config.max_num_batched_tokens,
                self.sizes.max_num_seqs,
                aligned,
            )
        scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.sizes.max_num_seqs,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
            draft=draft,
            vocab_size=loaded.config.vocab_size,
        )
        self._stepper = Stepper(scheduler, self.runner, torch.device(device))
        self.tokenizer = load_tokenizer(model)
        kv_tokens = self.sizes.num_kv_blocks * self.config.block_size
        self._limits = Limits(str(model), loaded.config.vocab_size, self.sizes.max_model_len, kv_tokens)
        self._end_tokens = end_tokens(loaded.module)
        self._ids = count()
        self._rng = random.Random(self.config.seed)

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
            prompts: one, or a list of them: texts, token ids, {"prompt": text} or {"prompt_token_ids": token ids}.
            sampling_params: for all, or one for each prompt.

        Raises:
            ValueError: see `submit`; nothing is generated then.
            RuntimeError: see `submit`; or nothing can run although requests are left.
        """
        every, names = listed(prompts)
        each = sampling_params if isinstance(sampling_params, list | tuple) else [sampling_params] * len(every)
        if len(each) != len(every):
            raise ValueError(f"{len(every)} prompts came with {len(each)} sampling_params: give one, or one for each")
        asked = [self._prepare(*of_one) for of_one in zip(every, each, names, strict=True)]
        self._stepper.left.extend(asked)  # whatever is raised, none of them outlives this call
        for answers in asked:
            self._stepper.add(answers)
        return self._run(asked, use_tqdm)

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
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(f"{self.config.model} has no chat template: use generate with prompts of your own")
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: Sequence[Messages] = [messages] if single else messages  # type: ignore[list-item,assignment]
        if any(rewritten_turns(self.tokenizer, each, **template_options) for each in conversations):
            warnings.warn(
                "the chat template rewrites earlier turns, so that only what comes before them can be reused: keep "
                "them as they were answered, or use a template that does",
                stacklevel=2,
            )
        prompts = [render_chat(self.tokenizer, each, **template_options) for each in conversations]
        tokens = [self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        return self.generate(tokens, sampling_params, use_tqdm=use_tqdm)

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
            self._stepper.left.extend(asked)
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
        self._stepper.left.append(answers)
        self._stepper.add(answers)
        self._stepper.left.remove(answers)
        return answers.request_id

    @alone
    def step(self) -> list[RequestOutput]:
        """Runs one step.

        Returns:
            The outputs that have grown or ended since they were last given, the same objects each time, brought up to
            date. There may be none although requests are under way: `idle` tells when all have ended.

        Raises:
            RuntimeError: the device has failed; nothing can run although requests are left; or another call is inside
                this engine.
        """
        self._stepper.advance()
        return self._stepper.give()

    @property
    def idle(self) -> bool:
        """Whether every request has ended and its output was given."""
        return self._stepper.idle

    @alone
    def abort(self, request_id: str) -> None:
        """Ends a request; what it committed stays cached. An unknown id is ignored: it may have ended."""
        answers = self._stepper.answers.get(request_id)
        if answers is not None:
            self._stepper.left.append(answers)

    @alone
    def reset_prefix_cache(self) -> None:
        """Forgets all that is cached, as after a change of weights. Running requests finish on what they have read."""
        self.cache.reset()

    @property
    def stats(self) -> CacheStats:
        """Totals of hits, losses by reason, and blocks, since the engine was made."""
        return self.cache.stats

    # --- inside ---

    def _prepare(
        self, prompt: Prompt, params: SamplingParams | None, name: str, request_id: str | None = None
    ) -> Answers:
        """The answers that a prompt asks for; they are not in line yet."""
        tokens = self._limits.tokens_of(prompt, name, self.tokenizer)
        params = self._limits.fit(SamplingParams() if params is None else params, len(tokens), name)
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{name} has stop strings and {self.config.model} has no tokenizer: use stop_token_ids")
        if not self.config.enable_prefix_caching:
            params = replace(params, read_cache=False, store_cache=False)
        if request_id is None:
            request_id = next(free for i in self._ids if (free := f"request-{i}") not in self._stepper.answers)
        if not isinstance(request_id, str):
            raise ValueError(f"request_id is {request_id!r}: give a string")
        ending = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._end_tokens)
        seed = self._rng.getrandbits(63) if params.seed is None else params.seed
        answers = Answers(request_id, tokens, params, ending, self.tokenizer, seed)
        if any(request.request_id in self._stepper.answers for request in answers.requests):
            raise ValueError(f"request id {request_id!r} is in use: choose another")
        return answers

    def _run(self, asked: Sequence[Answers], use_tqdm: bool) -> list[RequestOutput]:
        left = {answers.request_id for answers in asked}
        with tqdm(total=len(left), desc="prompts", disable=not use_tqdm) as bar:
            while left:
                self._stepper.advance()
                ended = [a for a in self._stepper.fresh.values() if a.request_id in left and a.output.finished]
                for answers in ended:
                    self._stepper.hand_out(answers)
                    left.remove(answers.request_id)
                    bar.update()
        return [answers.output for answers in asked]

    @alone
    def _begin(self, asked: list[Answers], prompt: Prompt, params: SamplingParams | None) -> None:
        asked.append(self._prepare(prompt, params, "the prompt"))
        self._stepper.add(asked[0])

    @alone
    def _next_output(self, answers: Answers) -> RequestOutput | None:
        return self._stepper.next_output(answers)

    @alone
    def _tidy(self) -> None:
        """Does what every call begins and ends with."""
