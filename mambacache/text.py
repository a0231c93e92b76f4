"""Between text and tokens: incremental detokenisation, stop strings, chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class Detokenizer:
    """Turns an answer's tokens into text as they come, and watches for stop strings.

    Text is held back while it may still change (an unfinished multi-byte character) or may turn out to be the beginning
    of a stop string. Each call decodes the last few tokens only.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._context = 0  # tokens from here are decoded again with each new one
        self._read = 0  # tokens up to here are in the text
        self._text = ""
        self._stopped = False

    def push(self, token: int) -> bool:
        """Takes the next token; True if the text now holds a stop string, which is cut off with all after it."""
        self._tokens.append(token)
        new = self._decode(self._context, len(self._tokens))
        if new.endswith(REPLACEMENT):
            return False
        return self._append(new)

    def finish(self) -> None:
        """No more tokens come: nothing is held back any more."""
        if not self._stopped and self._read < len(self._tokens):
            self._append(self._decode(self._context, len(self._tokens)))
        self._stop = ()

    @property
    def text(self) -> str:
        """The text that is certain."""
        if self._stopped:
            return self._text
        return self._text[: len(self._text) - self._held_back()]

    def _append(self, decoded: str) -> bool:
        known = self._decode(self._context, self._read)
        searched = len(self._text) - max((len(stop) for stop in self._stop), default=1) + 1
        if decoded != known:  # tokens without text are decoded again with the next: they may stand between two words
            self._text += decoded[len(known) :]
            self._context, self._read = self._read, len(self._tokens)
        found = [at for stop in self._stop if (at := self._text.find(stop, max(searched, 0))) >= 0]
        if found:
            self._text, self._stopped = self._text[: min(found)], True
        return self._stopped

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True) if end > start else ""

    def _held_back(self) -> int:
        """Characters at the end that may begin a stop string."""
        return max((self._overlap(stop) for stop in self._stop), default=0)

    def _overlap(self, stop: str) -> int:
        lengths = range(min(len(stop) - 1, len(self._text)), 0, -1)
        return next((length for length in lengths if self._text.endswith(stop[:length])), 0)


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
