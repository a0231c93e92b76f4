"""Read prompts from arguments, files and standard input."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mambacache.cli.options import SAMPLING
from mambacache.config import SamplingParams

if TYPE_CHECKING:
    from mambacache.engine.llm import LLM

FORMS = ("prompt", "prompt_token_ids", "messages")
STDIN = "-"


@dataclass(frozen=True)
class Asked:
    """Hold a text, token ids, messages or an invalid line."""

    where: str
    prompt: str | list[Any]
    params: SamplingParams
    is_chat: bool = False
    error: str | None = None


def read(prompts: Sequence[str], file: str | None, options: dict[str, Any]) -> list[Asked]:
    """Read prompts of arguments, then of a file; `-` means standard input."""
    params = SamplingParams(**options)
    asked: list[Asked] = []
    for number, prompt in enumerate(prompts, 1):
        asked += _of_lines(STDIN, params, options) if prompt == STDIN else [Asked(f"prompt {number}", prompt, params)]
    if file is not None:
        asked += _of_lines(file, params, options)
    if not asked:
        raise ValueError("there is no prompt: give some after the model, --prompts FILE, or - for standard input")
    return asked


def tokens_of_chat(llm: LLM, messages: list[Any]) -> list[int]:
    """Return the token ids of messages, or raise ValueError."""
    from mambacache.engine.text import render_chat

    if llm.tokenizer is None or not getattr(llm.tokenizer, "chat_template", None):
        raise ValueError(f"{llm.config.model} has no chat template: use generate, with prompts of your own")
    try:
        prompt = render_chat(llm.tokenizer, messages)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    try:
        return list(llm.tokenizer.encode(prompt, add_special_tokens=False))
    except Exception as error:  # a TypeError for invalid UTF-8
        raise ValueError(
            f"the messages cannot be encoded by the tokenizer ({type(error).__name__}: {error}): change them"
        ) from error


def _of_lines(file: str, params: SamplingParams, options: dict[str, Any]) -> list[Asked]:
    name = "standard input" if file == STDIN else file
    text = _text(file).removeprefix("\ufeff")  # a byte order mark
    lines = [(f"line {number} of {name}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_json = bool(lines) and lines[0][1].lstrip().startswith("{")
    asked = []
    for where, line in lines:
        try:
            _check_utf8(line, where)
            prompt = _of_json(line, where, options) if is_json else Asked(where, line.removesuffix("\r"), params)
        except ValueError as error:
            prompt = Asked(where, line, params, error=str(error))
        asked.append(prompt)
    return asked


def _text(file: str) -> str:
    """Return a file's text; invalid UTF-8 becomes surrogates."""
    if file != STDIN:
        return Path(file).read_text(encoding="utf-8", errors="surrogateescape")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin.read()


def _check_utf8(line: str, where: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is no UTF-8 text at character {error.start + 1}: encode it anew") from None


def _of_json(line: str, where: str, options: dict[str, Any]) -> Asked:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f'{where} is no JSON object: write {{"prompt": ...}}')
    forms = [form for form in FORMS if form in given]
    if len(forms) != 1:
        raise ValueError(f"{where} has {' and '.join(forms) or 'no prompt'}: give one of {', '.join(FORMS)}")
    (form,) = forms
    prompt = given.pop(form)
    unknown = [name for name in given if name not in SAMPLING]
    if unknown:
        raise ValueError(f"{where} has {unknown[0]!r}, which is no sampling parameter: remove it")
    if not isinstance(prompt, str if form == "prompt" else list):
        what = "a text" if form == "prompt" else "a list"
        raise ValueError(f"{where} has a {form} of type {type(prompt).__name__}: give {what}")
    try:
        params = SamplingParams(**options | given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return Asked(where, prompt, params, is_chat=form == "messages")
