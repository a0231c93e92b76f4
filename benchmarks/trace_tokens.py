"""Read prompts and answers as tokens from a trace in Mooncake's format.

A line has `input_length`, `output_length` and `hash_ids`, an id for each 512 tokens of the prompt. Equal ids stand for
equal prefixes. The tokens are made up. A prompt that begins with all whole blocks of an earlier prompt, two at least,
counts as the next turn of its chat. It then shares the earlier prompt with its last, partial block, and the answer too
if it is long enough.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ID_TOKENS = 512
LEAST_IDS = 2  # least ids shared by a next turn
FIRST_ANSWER_TOKEN = 1 << 30
MOST_IDS = FIRST_ANSWER_TOKEN // ID_TOKENS


@dataclass(slots=True, eq=False)
class Request:
    """Holds a request.

    Attributes:
        prompt: int32.
        ceiling: Its longest prefix in earlier requests, at most the prompt's length - 1.
        chat: Number of the first request of its chat.
        arrival: Seconds from the trace's begin.
    """

    prompt: np.ndarray
    answer: np.ndarray
    ceiling: int
    next_turn: bool
    chat: int = 0
    arrival: float = 0.0


class Reader:
    """Makes the requests of a trace, in order."""

    def __init__(self) -> None:
        self._ends: dict[int, Request] = {}  # latest request by the id of its prompt's last whole block
        self._tokens: dict[int, np.ndarray] = {}  # tokens by id
        self._answered = FIRST_ANSWER_TOKEN
        self._count = 0

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
        chat = parent.chat if parent is not None else self._count
        self._count += 1
        arrival = line.get("timestamp", 0) / 1e3
        request = Request(prompt, answer, min(ceiling, length - 1), parent is not None, chat, arrival)
        if length // ID_TOKENS >= LEAST_IDS:
            self._ends[ids[length // ID_TOKENS - 1]] = request
        return request

    def _of_id(self, number: int) -> np.ndarray:
        known = self._tokens.get(number)
        fresh = np.arange(number * ID_TOKENS, (number + 1) * ID_TOKENS, dtype=np.int32)
        if known is not None:
            fresh[: len(known)] = known
        return fresh


def check_line(line: Any) -> None:
    """Raise ValueError unless `line` is a request in Mooncake's format."""
    if not isinstance(line, dict):
        raise ValueError("it is not a JSON object")
    for name in ("input_length", "output_length"):
        if type(line.get(name)) is not int or line[name] < 1:
            raise ValueError(f"{name} is {line.get(name)!r}: give an integer, 1 or more")
    ids, length = line.get("hash_ids"), line["input_length"]
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < MOST_IDS for i in ids):
        raise ValueError(f"hash_ids is {ids!r:.80}: give a list of integers from 0 to {MOST_IDS - 1}")
    if len(ids) != -(-length // ID_TOKENS):
        raise ValueError(f"{length} tokens have {len(ids)} hash_ids: give one for each {ID_TOKENS} tokens")


def requests(trace: Path) -> Iterator[Request]:
    """Yield the requests of a .jsonl or .jsonl.gz file.

    Raises:
        ValueError: a line is not a request.
    """
    reader = Reader()
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                check_line(line)
            except ValueError as error:
                raise ValueError(f"line {number} of {trace} is not a request: {error}") from None
            yield reader.read(line)
