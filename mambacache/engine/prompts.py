"""Turn prompts into token ids; a wrong prompt or parameter raises ValueError."""

from __future__ import annotations

import math
import reprlib
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, Union

import numpy as np
import torch

from mambacache.config import NO_LIMIT, SamplingParams
from mambacache.engine.text import Tokenizer, chat_prompts
from mambacache.field_types import is_integer

TokenIds = Sequence[int] | np.ndarray | torch.Tensor
Prompt = Union[str, TokenIds, Mapping[str, Any], "Encoded"]

Messages = Sequence[dict[str, Any]]

FORMS = "a text, token ids, {'prompt': text} or {'prompt_token_ids': token ids}"


def listed(prompts: Prompt | Sequence[Prompt]) -> tuple[Sequence[Prompt], Sequence[str]]:
    if isinstance(prompts, list | tuple) and not (prompts and isinstance(prompts[0], Number)):
        return prompts, [f"prompt {i}" for i in range(len(prompts))]
    return [prompts], ["the prompt"]  # type: ignore[list-item]


@dataclass(frozen=True)
class Limits:
    """Check prompts and parameters against an engine's limits; `kv_tokens` is 0 without a KV pool."""

    model: str
    vocab_size: int
    max_model_len: int
    kv_tokens: int
    max_logprobs: int

    def tokens_of(self, prompt: Prompt, name: str, tokenizer: Tokenizer | None) -> list[int]:
        """Return the token ids of a prompt, which errors call `name`."""
        given = _of_mapping(prompt, name) if isinstance(prompt, Mapping) else prompt
        if isinstance(given, str):
            if tokenizer is None:
                raise ValueError(f"{name} is a text and {self.model} has no tokenizer: give the prompt as token ids")
            try:
                given = tokenizer.encode(given)
            except Exception as error:
                raise ValueError(
                    f"{name} cannot be encoded by the tokenizer ({type(error).__name__}: {error}): change it, or give "
                    "token ids"
                ) from error
        tokens = _integers(given, name)
        if not tokens:
            raise ValueError(f"{name} is empty: give at least one token")
        if _largest(tokens) >= self.vocab_size:
            outside = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise ValueError(
                f"{name} holds token {outside}, out of the vocabulary: give ids from 0 to {self.vocab_size - 1}"
            )
        return tokens

    def fit(self, params: SamplingParams, num_tokens: int, name: str, clip: bool = False) -> SamplingParams:
        """Check parameters; `clip` lowers `max_tokens` to the room left."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"the parameters of {name} are of type {type(params).__name__}: give SamplingParams")
        outside = next((token for token in params.logit_bias or () if token >= self.vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"logit_bias of {name} holds token {outside}, out of the vocabulary: give ids from 0 to "
                f"{self.vocab_size - 1}"
            )
        for option in ("logprobs", "prompt_logprobs"):
            if 0 <= self.max_logprobs < (getattr(params, option) or 0):
                raise ValueError(
                    f"{option} of {name} is {getattr(params, option)} and this engine gives {self.max_logprobs} at "
                    "most: lower it, or raise the engine's max_logprobs"
                )
        if params.top_k >= self.vocab_size:
            params = replace(params, top_k=0)
        stops = tuple(token for token in params.stop_token_ids or () if 0 <= token < self.vocab_size)
        if stops != params.stop_token_ids:
            params = replace(params, stop_token_ids=stops)
        if params.max_tokens == NO_LIMIT or clip:
            room = max(min(self.max_model_len, self.kv_tokens or self.max_model_len) - num_tokens, 1)
            if params.min_tokens > room:
                raise ValueError(
                    f"{name} has {num_tokens} tokens, which leave room for {room}, and min_tokens is "
                    f"{params.min_tokens}: shorten the prompt, or lower min_tokens"
                )
            params = replace(params, max_tokens=min(params.max_tokens, room))
        length, asked = num_tokens + params.max_tokens, f"{num_tokens} tokens and max_tokens is {params.max_tokens}"
        if length > self.max_model_len:
            raise ValueError(
                f"{name} has {asked}, and the model takes {self.max_model_len} in all: shorten the prompt, or lower "
                "max_tokens"
            )
        if self.kv_tokens and length > self.kv_tokens:
            raise ValueError(
                f"{name} has {asked}, and the KV pool holds {self.kv_tokens}: shorten it, or raise kv_cache_bytes"
            )
        return params


@dataclass(frozen=True)
class Encoded:
    tokens: list[int]
    params: SamplingParams
    text: str | None


@dataclass(frozen=True)
class Encoder:
    """Prepare prompts for an engine, in any thread; a single thread may use `tokenizer`."""

    limits: Limits
    tokenizer: Any
    default: SamplingParams
    caches: bool

    def __call__(self, prompt: Prompt, params: SamplingParams | None = None, name: str = "the prompt") -> Encoded:
        """Encode and check a prompt; an `Encoded` takes no `params`."""
        if isinstance(prompt, Encoded):
            if params is not None:
                raise ValueError(f"{name} is encoded and brings its own parameters: leave sampling_params out")
            return prompt
        tokens = self.limits.tokens_of(prompt, name, self.tokenizer)
        given = self.default if params is None else params
        fitted = self.limits.fit(given, len(tokens), name, clip=params is None)
        if fitted.stop and self.tokenizer is None:
            raise ValueError(f"{name} has stop strings and {self.limits.model} has no tokenizer: use stop_token_ids")
        if not self.caches:
            fitted = replace(fitted, read_cache=False, store_cache=False)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        return Encoded(tokens, fitted, text if isinstance(text, str) else None)

    def render(self, conversations: Sequence[Messages], **options: Any) -> list[dict[str, Any]]:
        """Render conversations; warn if the template rewrites earlier turns."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(f"{self.limits.model} has no chat template: use generate with prompts of your own")
        prompts, rewritten = chat_prompts(self.tokenizer, conversations, **options)
        if rewritten:
            warnings.warn(
                "the chat template rewrites earlier turns, so prefix hits end before them: keep the turns as they were "
                "answered, or use a template that does",
                stacklevel=3,
            )
        return prompts


def _of_mapping(prompt: Mapping[str, Any], name: str) -> Any:
    unknown = set(prompt) - {"prompt", "prompt_token_ids"}
    if unknown or not prompt:
        raise ValueError(f"{name} has the keys {sorted(map(str, prompt))}: give 'prompt' or 'prompt_token_ids'")
    return prompt.get("prompt_token_ids", prompt.get("prompt"))


def _largest(tokens: list[int]) -> float:
    try:
        return int(np.frombuffer(array("I", tokens), np.uint32).max())
    except OverflowError:
        return math.inf


def _integers(given: Any, name: str) -> list[int]:
    values = given.tolist() if isinstance(given, np.ndarray | torch.Tensor) else given
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray | memoryview):
        raise ValueError(f"{name} is of type {type(given).__name__}: give {FORMS}")
    if list(map(type, values)).count(int) == len(values):
        return list(values)
    wrong = [value for value in values if not is_integer(value)]
    if wrong:
        raise ValueError(
            f"{name} holds {reprlib.repr(wrong[0])} of type {type(wrong[0]).__name__}: give token ids as integers"
        )
    return [int(value) for value in values]
