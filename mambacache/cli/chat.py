"""Run `mambacache chat`: each line of standard input is a turn."""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING, Any

from mambacache.cli.generate import cache_line
from mambacache.cli.options import given_fields
from mambacache.cli.prompts import tokens_of_chat
from mambacache.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from mambacache.engine.llm import LLM

DEFAULTS = {"temperature": 0.0, "max_tokens": None}
RESET = "/reset"


def run(args: argparse.Namespace) -> int:
    """Answer all lines; return 1 if any failed."""
    params = SamplingParams(**DEFAULTS | given_fields(args, SamplingParams))
    if params.n > 1:
        raise ValueError("a chat goes on with one answer: leave n at 1")
    config = EngineConfig(args.model, **given_fields(args, EngineConfig))  # fails before torch is loaded
    from mambacache.engine.llm import LLM

    with LLM(config.model, **given_fields(args, EngineConfig)) as llm:
        return _chat(llm, params)


def _chat(llm: LLM, params: SamplingParams) -> int:
    tokens_of_chat(llm, [{"role": "user", "content": "?"}])  # fails without a template
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # invalid UTF-8 fails in its turn only
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{RESET} begins anew, Ctrl-C ends an answer, Ctrl-D ends the chat", file=sys.stderr)
    messages: list[dict[str, Any]] = []
    failed = False
    while (line := _line(terminal)) is not None:
        if line == RESET:
            messages.clear()
        elif line:
            failed |= not _turn(llm, messages, line, params)
    return 1 if failed else 0


def _line(terminal: bool) -> str | None:
    if terminal:
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip()
    except EOFError:
        return None


def _turn(llm: LLM, messages: list[dict[str, Any]], line: str, params: SamplingParams) -> bool:
    """Answer a line, and add both to the conversation unless it fails."""
    asked = [*messages, {"role": "user", "content": line}]
    output, said = None, ""
    try:
        for output in llm.stream(tokens_of_chat(llm, asked), params):
            said += output.outputs[0].delta
            print(output.outputs[0].delta, end="", flush=True)
    except KeyboardInterrupt:  # keeps the answer so far
        pass
    except ValueError as error:
        print(f"mambacache: {error}; {RESET} begins anew", file=sys.stderr)
        return False
    print(flush=True)
    if output is None:
        return True
    print(cache_line(output), file=sys.stderr)
    if output.outputs[0].error is not None:
        return False
    messages[:] = [*asked, {"role": "assistant", "content": said}]
    return True
