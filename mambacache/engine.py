"""`LLM`: a model, its caches and a scheduler, on one device."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from mambacache.answers import Answers
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.cache.report import CacheStats
from mambacache.config import CacheConfig, EngineConfig, SamplingParams
from mambacache.models.adapt import load_model
from mambacache.outputs import RequestOutput
from mambacache.runner.model_runner import ModelRunner
from mambacache.runner.sizing import free_memory, plan_memory, present_device
from mambacache.runner.state_pool import StatePool, allocate_kv_pages
from mambacache.scheduler.request import Request
from mambacache.scheduler.scheduler import DraftSource, Scheduler
from mambacache.text import render_chat, rewritten_turns

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


class LLM:
    """Generates text with a Hugging Face checkpoint; prompts that begin alike are computed once.

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
        self._scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.sizes.max_num_seqs,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
            draft=draft,
        )
        self.tokenizer = _load_tokenizer(model)
        self._vocab_size: int = loaded.config.vocab_size
        self._end_tokens = _end_tokens(loaded.module)
        self._answers: dict[str, Answers] = {}  # by the id of each of their requests
        self._fresh: dict[str, Answers] = {}  # whose output has news that were not given yet
        self._ids = count()
        self._rng = random.Random(self.config.seed)

    # --- one call for all ---

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers prompts, in their order.

        Args:
            prompts: a text or token ids, or a list of such.
            sampling_params: for all, or one for each prompt.

        Raises:
            ValueError: see `submit`; nothing is generated then.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        every: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[list-item,assignment]
        params = sampling_params or SamplingParams()
        each = [params] * len(every) if isinstance(params, SamplingParams) else params
        if len(each) != len(every):
            raise ValueError(f"{len(every)} prompts came with {len(each)} sampling_params: give one, or one for each")
        ids: list[str] = []
        try:
            for prompt, its_params in zip(every, each, strict=True):
                ids.append(self.submit(prompt, its_params))
            return self._run(ids, use_tqdm)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise

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
        request_id = self.submit(prompt, sampling_params)
        answers = self._answers[request_id]
        try:
            while request_id in self._fresh or not answers.output.finished:
                if request_id in self._fresh:
                    yield self._hand_out(answers)
                else:
                    self._advance()
        finally:
            self.abort(request_id)

    # --- step by step ---

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Puts a prompt in line; gives the id under which `step` reports it.

        Raises:
            ValueError: the prompt is empty, too long for the model or the KV pool, or holds tokens out of the
                vocabulary; or text is wanted and there is no tokenizer.
        """
        params = sampling_params or SamplingParams()
        if not self.config.enable_prefix_caching:
            params = replace(params, read_cache=False, store_cache=False)
        tokens = self._encode(prompt)
        self._check(tokens, params)
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        end_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_tokens)
        seed = self._rng.getrandbits(63) if params.seed is None else params.seed
        answers = Answers(request_id, tokens, params, end_tokens, self.tokenizer, seed)
        its_ids = [request.request_id for request in answers.requests]
        if any(each in self._answers for each in its_ids):
            raise ValueError(f"request id {request_id!r} is in use: choose another")
        self._scheduler.add(answers.requests[0])
        self._answers.update(dict.fromkeys(its_ids, answers))
        return request_id

    def step(self) -> list[RequestOutput]:
        """Runs one step.

        Returns:
            The outputs that have grown or ended since they were last given, the same objects each time, brought up to
            date. There may be none although requests are under way: `idle` tells when all have ended.
        """
        self._advance()
        return [self._hand_out(answers) for answers in list(self._fresh.values())]

    @property
    def idle(self) -> bool:
        """Whether every request has ended and its output was given."""
        return not self._answers

    def abort(self, request_id: str) -> None:
        """Ends a request; what it committed stays cached. An unknown id is ignored: it may have ended."""
        answers = self._answers.get(request_id)
        if answers is not None:
            for request in answers.requests:
                self._scheduler.abort(request.request_id)
            answers.refresh()
            self._forget(answers)

    def reset_prefix_cache(self) -> None:
        """Forgets all that is cached, as after a change of weights. Running requests finish on what they have read."""
        self.cache.reset()

    @property
    def stats(self) -> CacheStats:
        """Totals of hits, losses by reason, and blocks, since the engine was made."""
        return self.cache.stats

    # --- inside ---

    def _run(self, ids: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        left = {request_id: self._answers[request_id] for request_id in ids}
        outputs = [answers.output for answers in left.values()]
        with tqdm(total=len(ids), desc="prompts", disable=not use_tqdm) as bar:
            while left:
                self._advance()
                for request_id in [each for each in self._fresh if each in left and left[each].output.finished]:
                    self._hand_out(left.pop(request_id))
                    bar.update()
        return outputs

    def _advance(self) -> None:
        """Runs one step, and brings up to date the outputs of the requests that it brought on."""
        plan = self._scheduler.schedule()
        if plan is None:
            return
        try:
            rows = self.runner.execute(plan, [self._answers[step.request_id].sampling(step) for step in plan.steps])
        except BaseException as error:
            logger.exception("a step of %d requests failed", len(plan.steps))
            self._refresh(self._scheduler.failed(plan, error))
            if not isinstance(error, Exception):
                raise
            return
        self._scheduler.issued(plan)
        for step, row in zip(plan.steps, rows, strict=True):
            self._answers[step.request_id].keep_logprobs(step, row)
        self._refresh(self._scheduler.update(plan, [row.tokens for row in rows]))

    def _refresh(self, requests: Sequence[Request]) -> None:
        brought_on = {a.output.request_id: a for a in (self._answers[r.request_id] for r in requests)}
        for answers in brought_on.values():
            answers.refresh()
        self._fresh |= brought_on

    def _hand_out(self, answers: Answers) -> RequestOutput:
        if answers.output.finished:
            self._forget(answers)
        else:
            del self._fresh[answers.output.request_id]
        return answers.hand_out()

    def _forget(self, answers: Answers) -> None:
        self._fresh.pop(answers.output.request_id, None)
        for request in answers.requests:
            del self._answers[request.request_id]

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer: give the prompt as token ids")
        return self.tokenizer.encode(prompt)

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        if not tokens:
            raise ValueError("the prompt is empty: give at least one token")
        outside = next((t for t in tokens if not 0 <= t < self._vocab_size), None)
        if outside is not None:
            raise ValueError(f"token {outside} is out of the vocabulary: give ids from 0 to {self._vocab_size - 1}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer: use stop_token_ids in place of stop")
        length = len(tokens) + params.max_tokens
        if length > self.sizes.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {params.max_tokens}, and the model takes "
                f"{self.sizes.max_model_len} in all: shorten the prompt, or lower max_tokens"
            )
        if self.sizes.num_kv_blocks and length > self.sizes.num_kv_blocks * self.config.block_size:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {params.max_tokens}, and the KV pool holds "
                f"{self.sizes.num_kv_blocks * self.config.block_size}: shorten it, or raise kv_cache_bytes"
            )


def _load_tokenizer(model: str | Path) -> Any:
    """The checkpoint's tokenizer, or None if it has none: prompts are then token ids, and answers have no text."""
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError):
        warnings.warn(f"{model} has no tokenizer that can be loaded: give prompts as token ids", stacklevel=3)
        return None


def _end_tokens(module: Any) -> frozenset[int]:
    """The tokens with which the model ends an answer."""
    generation = getattr(module, "generation_config", None)
    for config in (generation, module.config):
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            return frozenset([end] if isinstance(end, int) else end)
    return frozenset()
