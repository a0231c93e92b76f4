"""Convert tokens to text, and find stop strings."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

REPLACEMENT = "\ufffd"

LONGEST_CHARACTER = 4
"""Most bytes of a character in UTF-8, each perhaps a token."""

MAX_PENDING = 16
"""Most tokens to wait for a character, or for any text."""

MAX_CONTEXT = 8
"""Most known tokens to decode again: dropping tokens costs a call."""


class Tokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class _Read(NamedTuple):
    """Hold an answer's text so far; a tokenizer error leaves the old value."""

    num_tokens: int = 0
    window: tuple[int, ...] = ()
    known: int = 0  # tokens of `window` in `text`
    shown: str = ""
    text: str = ""
    held: int = 0  # characters held back
    stop: str | None = None


class Detokenizer:
    """Convert an answer's tokens to text as they come, and find stop strings.

    Unfinished characters and possible starts of stop strings are held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._tokens: list[int] = []
        self._read = _Read()
        self._ended = False

    def completes_stop(self, position: int, token: int) -> bool:
        """Take the token at a position, perhaps again; tell whether a stop string is reached."""
        if position != self.count:
            self._rewind(position)
        self._tokens[position:] = [token]
        self._read = self._next(self._read)
        return self._read.stop is not None

    def finish(self, count: int) -> None:
        if count < self.count:
            self._rewind(count)
        read = self._read
        if read.stop is None and read.known < len(read.window):
            self._read = self._append(read, len(read.window), self._decode(read.window))
        self._ended = True

    @property
    def count(self) -> int:
        """Count tokens, even of failed steps."""
        return self._read.num_tokens

    @property
    def text(self) -> str:
        read = self._read
        if read.stop is not None or self._ended:
            return read.text
        return read.text[: len(read.text) - read.held]

    @property
    def stop(self) -> str | None:
        return self._read.stop

    def _rewind(self, position: int) -> None:
        assert position <= len(self._tokens), "no token is left out"
        read = _Read()
        while read.num_tokens < position:
            read = self._next(read)
        self._read = read

    def _next(self, read: _Read) -> _Read:
        window = (*read.window, self._tokens[read.num_tokens])
        read = _Read(read.num_tokens + 1, window, *read[2:])
        new, waits = self._decode(window), len(window) - read.known <= MAX_PENDING
        if new == read.shown:
            # Tokens without text may separate words.
            return read if waits else read._replace(window=window[: read.known] + window[-1:])
        if not new.endswith(REPLACEMENT):
            return self._append(read, len(window), new)
        if not self._decode(window[-2:]) and len(window) > 1:
            # Keep a single token without text inside a character.
            return read._replace(window=window[:-1])
        if waits:
            return read
        end = self._cut(window, read.known, new)
        return self._append(read, end, self._decode(window[:end]))

    def _cut(self, window: tuple[int, ...], known: int, whole: str) -> int:
        for end in range(len(window) - LONGEST_CHARACTER, known, -1):
            if self._decode(window[:end]) + self._decode(window[end:]) == whole:
                return end
        return len(window)

    def _append(self, read: _Read, end: int, decoded: str) -> _Read:
        old, text = len(read.text), read.text + decoded[len(read.shown) :]
        if decoded != read.shown:
            window, known, shown = read.window, end, decoded
            if known > MAX_CONTEXT:
                window, known = window[read.known :], known - read.known
                shown = self._decode(window[:known])
            held = self._held_back(text, read.held + len(text) - old)
            read = _Read(read.num_tokens, window, known, shown, text, held)
        if read.num_tokens <= self._min_tokens:
            return read
        found = [
            (at, len(stop), stop) for stop in self._stop if (at := text.find(stop, max(old - len(stop) + 1, 0))) >= 0
        ]
        if not found:
            return read
        at, length, stop = min(found)
        return read._replace(text=text[: at + length if self._keep_stop else at], stop=stop)

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=self._skip_special_tokens)
        if not isinstance(text, str):
            raise TypeError(f"the tokenizer decodes to {type(text).__name__}: it must give a str")
        return text

    def _held_back(self, text: str, most: int) -> int:
        for length in range(min(most, self._longest_stop - 1), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0


def render_chat(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


def rewritten_turns(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any) -> bool:
    """Return whether the template rewrites the last answer."""
    answers = [i for i, message in enumerate(messages) if i and message.get("role") == "assistant"]
    if not answers:
        return False
    last = answers[-1]
    content = messages[last].get("content")
    then = render_chat(tokenizer, messages[:last], **options) + (content if isinstance(content, str) else "")
    return not render_chat(tokenizer, messages, **options).startswith(then)


def chat_prompts(
    tokenizer: Tokenizer, conversations: Sequence[Sequence[dict[str, Any]]], **options: Any
) -> tuple[list[dict[str, Any]], bool]:
    """Return the prompts of conversations, and whether any has `rewritten_turns`."""
    prompts, rewritten = [], False
    for i, messages in enumerate(conversations):
        if not isinstance(messages, list | tuple) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(
                f"conversation {i} is {reprlib.repr(messages)}: give a list of messages, such as "
                "{'role': 'user', 'content': 'a text'}"
            )
        try:
            text = render_chat(tokenizer, messages, **options)
            tokens = tokenizer.encode(text, add_special_tokens=False)
            rewritten = rewritten or rewritten_turns(tokenizer, messages, **options)
        except Exception as error:
            raise ValueError(
                f"conversation {i} makes no prompt ({type(error).__name__}: {error}): change its messages, or the "
                "chat template"
            ) from error
        prompts.append({"prompt": text, "prompt_token_ids": tokens})
    return prompts, rewritten
