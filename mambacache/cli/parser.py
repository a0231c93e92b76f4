"""Parse the commands and their arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from mambacache import __version__
from mambacache.cli import chat, generate, plan
from mambacache.cli.options import add_fields, size
from mambacache.config import EngineConfig, SamplingParams

MODEL = "directory of a checkpoint, or a Hub id"
PROMPTS = (
    'a file with a prompt on each line; or, if its first line begins with "{", a JSON object on each line, with '
    '"prompt", "prompt_token_ids" or "messages", and its own sampling parameters; - for standard input'
)

MEMORY = "memory of a GPU to plan for, such as 80GB, in place of this machine's; implies bfloat16 without --dtype"

FLAG = re.compile(r"-(?!\d*\.?\d+$)\S+")
"""Match flags as argparse does."""


class Parser(argparse.ArgumentParser):
    """Raise errors as ValueError, in a sentence."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see {self.prog} --help")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return a command's arguments, with its function `run`; words after `--` are prompts."""
    parser, words = _parser(), list(argv)
    end = words.index("--") if "--" in words else len(words)
    args, rest = parser.parse_known_args(words[:end])
    unknown = any(FLAG.fullmatch(word) for word in rest)
    rest += words[end + 1 :]
    if unknown or (rest and not hasattr(args, "prompt")):
        parser.error(f"unknown arguments {' '.join(rest)}")
    if rest:
        args.prompt += rest  # prompts after a flag
    return args


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="mambacache", description="Prefix caching for models with recurrent state.")
    parser.add_argument("--version", action="version", version=f"mambacache {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    answer = commands.add_parser("generate", help="answer prompts", allow_abbrev=False)
    answer.set_defaults(run=generate.run)
    answer.add_argument("model", metavar="MODEL", help=MODEL)
    answer.add_argument("prompt", metavar="PROMPT", nargs="*", help="a prompt; - reads prompts from standard input")
    answer.add_argument("--prompts", metavar="FILE", help=PROMPTS)
    form = answer.add_mutually_exclusive_group()
    form.add_argument("--jsonl", action="store_true", help="print a JSON object for each answer, with its cache report")
    form.add_argument("--stream", action="store_true", help="answer prompts in turn, and print text as it comes")
    add_fields(answer, SamplingParams, generate.DEFAULTS)

    talk = commands.add_parser("chat", help="hold a conversation, each line a turn", allow_abbrev=False)
    talk.set_defaults(run=chat.run)
    talk.add_argument("model", metavar="MODEL", help=MODEL)
    add_fields(talk, SamplingParams, chat.DEFAULTS)

    sizes = commands.add_parser(
        "plan", help="print the memory of a model's states and KV, without loading it", allow_abbrev=False
    )
    sizes.set_defaults(run=plan.run)
    sizes.add_argument("model", metavar="MODEL", help=MODEL)
    sizes.add_argument("--memory", type=size, metavar="BYTES", help=MEMORY)
    sizes.add_argument("--tensor-parallel-size", type=int, metavar="N", help="number of GPUs of vLLM with the plugin")
    sizes.add_argument("--state-bytes", type=size, metavar="BYTES", help="memory of states and token logs on each GPU")
    sizes.add_argument("--quantization", choices=["fp8"], help="quantization of the weights")

    show = commands.add_parser(
        "demo", help="answer 20 questions about a document, with and without the cache", allow_abbrev=False
    )
    show.set_defaults(run=_demo)
    show.add_argument("--device", default="auto", help="auto, cpu or cuda")
    for command in (answer, talk):
        add_fields(command, EngineConfig)
    add_fields(sizes, EngineConfig)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from mambacache.demo.run import run

    return run(args.device)
