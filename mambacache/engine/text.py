"""Between text and tokens: incremental detokenisation, stop strings, chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Read:
    """What the first `count` tokens of an answer say. Never changed but replaced, so that whatever a tokenizer raises
    leaves the one before."""

    count: int = 0
    context: int = 0  # tokens from here are decoded again with each new one
    known: int = 0  # tokens up to here are in the text
    text: str = ""
    stopped: bool = False


class Detokenizer:
    """Turns an answer's tokens into text as they come, and watches for stop strings.

    Text is held back while it may still change (an unfinished multi-byte character) or may turn out to be the beginning
    of a stop string. Each call decodes the last few tokens only. What the tokenizer raises goes through, and changes
    nothing.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
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
        return self._read.stopped

    def finish(self, count: int) -> None:
        """No tokens come but the first `count`: nothing is held back any more."""
        if count < self.count:
            self._rewind(count)
        read = self._read
        if not read.stopped and read.known < read.count:
            self._read = self._append(read, self._decode(read.context, read.count))
        self._ended = True

    @property
    def count(self) -> int:
        """Tokens that are read. More than the answer has are those of a step that failed after they were taken."""
        return self._read.count

    @property
    def text(self) -> str:
        """The text that is certain."""
        read = self._read
        if read.stopped or self._ended:
            return read.text
        return read.text[: len(read.text) - self._held_back()]

    def _rewind(self, position: int) -> None:
        assert position <= len(self._tokens), "no token is left out"
        read = _Read()
        while read.count < position:
            read = self._next(read)
        self._read = read

    def _next(self, read: _Read) -> _Read:
        """Reads one token more."""
        read = replace(read, count=read.count + 1)
        new = self._decode(read.context, read.count)
        return read if new.endswith(REPLACEMENT) else self._append(read, new)

    def _append(self, read: _Read, decoded: str) -> _Read:
        before = self._decode(read.context, read.known)
        searched = len(read.text) - max((len(stop) for stop in self._stop), default=1) + 1
        if decoded != before:  # tokens without text are decoded again with the next: they may stand between two words
            text = read.text + decoded[len(before) :]
            read = replace(read, text=text, context=read.known, known=read.count)
        found = [at for stop in self._stop if (at := read.text.find(stop, max(searched, 0))) >= 0]
        return replace(read, text=read.text[: min(found)], stopped=True) if found else read

    def _decode(self, start: int, end: int) -> str:
        if end == start:
            return ""
        text = self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)
        if not isinstance(text, str):
            raise TypeError(f"the tokenizer decodes to {type(text).__name__}: it must give a str")
        return text

    def _held_back(self) -> int:
        """Characters at the end that may begin a stop string."""
        return max((self._overlap(stop) for stop in self._stop), default=0)

    def _overlap(self, stop: str) -> int:
        text = self._read.text
        lengths = range(min(len(stop) - 1, len(text)), 0, -1)
        return next((length for length in lengths if text.endswith(stop[:length])), 0)


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
