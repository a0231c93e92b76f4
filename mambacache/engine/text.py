"""Between text and tokens: incremental detokenisation, stop strings, chat templates."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

REPLACEMENT = "\ufffd"

LONGEST_CHARACTER = 4
"""Bytes of UTF-8, and so tokens, that one character takes."""

MAX_PENDING = 16
"""Tokens that are waited for at most until they make a character, or a text at all."""

MAX_CONTEXT = 8
"""Tokens in the text, about, that are decoded again with each new one: to drop some takes a call of its own."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class _Read(NamedTuple):
    """What the first tokens of an answer say. Never changed but replaced, so that whatever a tokenizer raises leaves
    the one before."""

    num_tokens: int = 0
    window: tuple[int, ...] = ()  # tokens that are decoded again with each new one
    known: int = 0  # how many of them are in the text
    shown: str = ""  # what these decode to
    text: str = ""
    held: int = 0  # characters at the text's end that may begin a stop string
    stop: str | None = None  # that ended it


class Detokenizer:
    """Turns an answer's tokens into text as they come, and watches for stop strings.

    Text is held back while it may still change (an unfinished multi-byte character) or may turn out to be the beginning
    of a stop string. Each call decodes the last few tokens only, whatever they are. What the tokenizer raises goes
    through, and changes nothing.

    Args:
        stop: strings that end the text.
        keep_stop: whether the one that does stays in it.
        min_tokens: what ends among so many first tokens is no stop.
        skip_special_tokens: whether special tokens have no text.
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
        """Takes the answer's token at a position, its first one at 0.

        A step may fail after some of its tokens were taken here: they are taken again, or others in their place. The
        tokens before `position` are then read anew.

        Returns:
            Whether the text now holds a stop string, which is cut off with all after it.
        """
        if position != self.count:
            self._rewind(position)
        self._tokens[position:] = [token]
        self._read = self._next(self._read)
        return self._read.stop is not None

    def finish(self, count: int) -> None:
        """No tokens come but the first `count`: nothing is held back any more."""
        if count < self.count:
            self._rewind(count)
        read = self._read
        if read.stop is None and read.known < len(read.window):
            self._read = self._append(read, len(read.window), self._decode(read.window))
        self._ended = True

    @property
    def count(self) -> int:
        """Tokens that are read. More than the answer has are those of a step that failed after they were taken."""
        return self._read.num_tokens

    @property
    def text(self) -> str:
        """The text that is certain."""
        read = self._read
        if read.stop is not None or self._ended:
            return read.text
        return read.text[: len(read.text) - read.held]

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._read.stop

    def _rewind(self, position: int) -> None:
        assert position <= len(self._tokens), "no token is left out"
        read = _Read()
        while read.num_tokens < position:
            read = self._next(read)
        self._read = read

    def _next(self, read: _Read) -> _Read:
        """Reads one token more."""
        window = (*read.window, self._tokens[read.num_tokens])
        read = _Read(read.num_tokens + 1, window, *read[2:])
        new, waits = self._decode(window), len(window) - read.known <= MAX_PENDING
        if new == read.shown:
            # Tokens without text are decoded again with the next: they may stand between two words. One of many does.
            return read if waits else read._replace(window=window[: read.known] + window[-1:])
        if not new.endswith(REPLACEMENT):
            return self._append(read, len(window), new)
        if not self._decode(window[-2:]) and len(window) > 1:
            # Tokens without text may stand inside a character too. One of many does, so that they push nothing out.
            return read._replace(window=window[:-1])
        if waits:
            return read
        end = self._cut(window, read.known, new)
        return self._append(read, end, self._decode(window[:end]))

    def _cut(self, window: tuple[int, ...], known: int, whole: str) -> int:
        """Where no character is cut in two, so far from the end that what comes before will not change."""
        for end in range(len(window) - LONGEST_CHARACTER, known, -1):
            if self._decode(window[:end]) + self._decode(window[end:]) == whole:
                return end
        return len(window)

    def _append(self, read: _Read, end: int, decoded: str) -> _Read:
        """Takes the window's tokens up to `end` into the text, and what they decode to."""
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
        # What ends in the new text; of several the one that begins first.
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
        """Return the number of characters at the end that may begin a stop string, at most `most`.

        It grows by new characters alone, so that a token costs few comparisons however long the stop strings are.
        """
        for length in range(min(most, self._longest_stop - 1), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0


def render_chat(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    """The prompt that the tokenizer's chat template makes of a conversation, ready for the next answer."""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


def rewritten_turns(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any) -> bool:
    """Whether the template renders an earlier turn otherwise than when it was answered (many drop its reasoning): what
    was computed then is not a prefix now, and only what comes before that turn can be reused."""
    answers = [i for i, message in enumerate(messages) if i and message.get("role") == "assistant"]
    if not answers:
        return False
    last = answers[-1]
    content = messages[last].get("content")  # None beside tool calls, a list of parts in some clients
    then = render_chat(tokenizer, messages[:last], **options) + (content if isinstance(content, str) else "")
    return not render_chat(tokenizer, messages, **options).startswith(then)


def chat_prompts(
    tokenizer: Tokenizer, conversations: Sequence[Sequence[dict[str, Any]]], **options: Any
) -> tuple[list[dict[str, Any]], bool]:
    """The prompts of conversations, each with its text and its token ids; and whether any has `rewritten_turns`.

    Raises:
        ValueError: one is no list of messages, or cannot be rendered or encoded; the message says which.
    """
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
