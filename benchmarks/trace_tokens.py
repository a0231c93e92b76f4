"""Prompts and answers, as tokens, of a trace in Mooncake's format.

A line of such a trace has `input_length`, `output_length` and `hash_ids`: an id for each 512 tokens of the prompt,
equal only if all before it is equal too. What ids cannot tell is made up: a prompt that begins with all whole blocks of
an earlier one, two at least, is taken for the next turn of its chat, and shares its last, partial block as well, and
its answer; one that is shorter than prompt and answer together shares the prompt alone (the answer was edited).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ID_TOKENS = 512
LEAST_IDS = 2  # that a next turn shares
FIRST_ANSWER_TOKEN = 1 << 30


@dataclass(slots=True, eq=False)
class Request:
    """`ceiling`: how many leading tokens of the prompt some earlier prompt or answer had; at most its length - 1."""

    prompt: np.ndarray  # int32
    answer: np.ndarray
    ceiling: int
    next_turn: bool


class Reader:
    """Gives the requests of a trace in their order."""

    def __init__(self) -> None:
        self._ends: dict[int, Request] = {}  # by the id of the last whole block of its prompt: the latest one
        self._tokens: dict[int, np.ndarray] = {}  # what an id stands for
        self._answered = FIRST_ANSWER_TOKEN

    def read(self, line: dict) -> Request:
        ids, length = line["hash_ids"], line["input_length"]
        parent = next((self._ends[i] for i in reversed(ids[LEAST_IDS - 1 :]) if i in self._ends), None)
        prompt = np.concatenate([self._of_id(i) for i in ids])[:length]
        known = next((depth for depth in range(len(ids), 0, -1) if ids[depth - 1] in self._tokens), 0)
        ceiling = sum(len(self._tokens[i]) for i in ids[:known])
        if parent is not None and len(parent.prompt) <= length:
            turn = np.concatenate([parent.prompt, parent.answer])
            shared = len(turn) if len(turn) <= length else len(parent.prompt)
            if shared > ceiling:
                prompt[:shared] = turn[:shared]
                ceiling = shared
        for number, i in enumerate(ids):
            part = prompt[number * ID_TOKENS : (number + 1) * ID_TOKENS]
            if len(part) > len(self._tokens.get(i, ())):
                self._tokens[i] = part
        count = line["output_length"]
        answer = np.arange(self._answered, self._answered + count, dtype=np.int32)
        self._answered += count
        request = Request(prompt, answer, min(ceiling, length - 1), parent is not None)
        if length // ID_TOKENS >= LEAST_IDS:
            self._ends[ids[length // ID_TOKENS - 1]] = request
        return request

    def _of_id(self, number: int) -> np.ndarray:
        known = self._tokens.get(number)
        fresh = np.arange(number * ID_TOKENS, (number + 1) * ID_TOKENS, dtype=np.int32)
        if known is not None:
            fresh[: len(known)] = known
        return fresh


def requests(trace: Path) -> Iterator[Request]:
    reader = Reader()
    with trace.open() as lines:
        for line in lines:
            yield reader.read(json.loads(line))
