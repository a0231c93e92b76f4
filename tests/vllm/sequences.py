"""Model sequences with numbers as states, keys and values; tokens follow from these."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field

from vllm.v1.request import Request

VOCABULARY = 50


def keys_of(request: Request) -> dict[int, str]:
    """Return the keys that separate requests with equal tokens, by position: -1, or the start of an image."""
    lora = request.lora_request
    adapter = f"{lora.lora_name} {lora.lora_path}" if lora else ""
    return {-1: f"{request.cache_salt} {adapter}"} | {
        each.mm_position.offset: each.identifier for each in request.mm_features
    }


def prefixes(tokens: list[int], keys: dict[int, str]) -> list[int]:
    """Return `prefix[n]` for n from 0 on."""
    found = [extend(0, 0, keys[-1])]
    for position, token in enumerate(tokens):
        found.append(extend(found[-1], token, keys.get(position)))
    return found


def extend(prefix: int, token: int, key: str | None = None) -> int:
    """Return the same number in every process, so that a mix comes again."""
    return zlib.crc32(f"{prefix} {token} {key}".encode())


def sampled(prefix: int) -> int:
    return prefix % VOCABULARY


@dataclass
class Sequence:
    """Hold a request as the worker knows it."""

    tokens: list[int]
    prompt: int
    keys: dict[int, str]
    pages: list[int]
    prefix: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)  # after its last token

    def draft(self, rng: random.Random, count: int) -> None:
        """Guess some of the next tokens, nearly all of them right."""
        self.drafts, last = [], self.prefix[-1]
        for _ in range(count):
            self.drafts.append(sampled(last) if rng.random() < 0.8 else rng.randrange(VOCABULARY))
            last = extend(last, self.drafts[-1])

    def verified(self) -> list[int]:
        """Return the tokens after the last known token: the right drafts, and a token of the model's."""
        tokens = [sampled(self.prefix[len(self.tokens)])]
        for draft in self.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(sampled(self.prefix[len(self.tokens) + len(tokens)]))
        return tokens


def expected(request: Request) -> list[int]:
    """Return the answer to a prompt: stop tokens end it."""
    last = prefixes(list(request.prompt_token_ids), keys_of(request))[-1]
    answer: list[int] = []
    while len(answer) < request.max_tokens:
        answer.append(sampled(last))
        last = extend(last, answer[-1])
        if answer[-1] in request.sampling_params.stop_token_ids:
            break
    return answer
