"""The command line: `mambacache generate`, `mambacache plan` and `mambacache demo`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mambacache.config import EngineConfig, SamplingParams
from mambacache.engine.outputs import RequestOutput

ENGINE_OPTIONS: dict[str, type] = {
    "device": str,
    "dtype": str,
    "state_dtype": str,
    "max_num_batched_tokens": int,
    "max_num_seqs": int,
    "max_model_len": int,
    "checkpoint_budget_bytes": int,
    "kv_cache_bytes": int,
    "checkpoint_interval": int,
    "max_draft_tokens": int,
    "seed": int,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 if it did its work, 1 with one sentence on standard error if it cannot."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (ValueError, TypeError, OSError) as error:
        print(f"mambacache: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mambacache", description="Prefix caching for models with recurrent state.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="answer prompts")
    generate.set_defaults(run=_generate)
    generate.add_argument("--model", required=True, help="directory of a checkpoint, or a Hub id")
    generate.add_argument("--prompt", action="append", default=[], help="a prompt; may be given again")
    generate.add_argument("--prompts", type=Path, metavar="FILE", help="a text file with one prompt a line")
    generate.add_argument("--max-tokens", type=int, default=64, help="answer tokens at most (64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    generate.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt in full")
    generate.add_argument("--strict-reuse", action="store_true", help="reuse only what a cold prefill would compute")
    generate.add_argument("--json", action="store_true", help="one JSON object a prompt, with its cache report")
    plan = commands.add_parser("plan", help="what a model's states and KV take, before anything is loaded")
    plan.set_defaults(run=_plan)
    plan.add_argument("model", help="directory of a checkpoint, or a Hub id")
    plan.add_argument("--memory-bytes", type=int, help="free memory to plan for, in place of this device's")
    demo = commands.add_parser("demo", help="20 questions about one document, with the cache and without it")
    demo.set_defaults(run=_demo)
    demo.add_argument("--device", default="auto", help="auto, cpu or cuda")
    for command in (generate, plan):
        for name, kind in ENGINE_OPTIONS.items():
            command.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"see EngineConfig.{name}")
    return parser


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {f.name: v for f in fields(EngineConfig) if (v := getattr(args, f.name, None)) is not None}


def _generate(args: argparse.Namespace) -> int:
    from mambacache.engine.llm import LLM  # loads torch and transformers

    prompts = args.prompt + (args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else [])
    if not prompts:
        raise ValueError("there is no prompt: give --prompt TEXT or --prompts FILE")
    llm = LLM(**_engine_options(args), enable_prefix_caching=not args.no_prefix_caching)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    failed = 0
    for output in llm.generate(prompts, params):
        print(json.dumps(_as_json(output)) if args.json else output.outputs[0].text)
        failed += output.outputs[0].error is not None
        print(_cache_line(output), file=sys.stderr)
    return 1 if failed else 0


def _as_json(output: RequestOutput) -> dict[str, Any]:
    answer, cache = output.outputs[0], output.cache
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
        "time_to_first_token": output.time_to_first_token,
        "cache": cache and {"prompt": cache.prompt, "hit": cache.hit, "ceiling": cache.ceiling, "losses": cache.losses},
    }


def _cache_line(output: RequestOutput) -> str:
    if output.outputs[0].error is not None:
        return f"error: {output.outputs[0].error}"
    cache, first = output.cache, output.time_to_first_token
    assert cache is not None and first is not None, "a finished request ran"
    losses = ", ".join(f"{tokens} {reason}" for reason, tokens in cache.losses.items()) or "none"
    return (
        f"prompt {cache.prompt}, hit {cache.hit} of {cache.ceiling} computed before (lost: {losses}), "
        f"first token after {first * 1e3:.0f} ms"
    )


def _plan(args: argparse.Namespace) -> int:
    from mambacache.models.adapt import model_skeleton
    from mambacache.runner.sizing import describe, free_memory, plan_memory, resolve_device

    config = EngineConfig(**_engine_options(args))
    model = model_skeleton(config.model, config.dtype, resolve_device(config.device))
    free = free_memory(config.device) if args.memory_bytes is None else args.memory_bytes
    print(describe(config, model, plan_memory(config, model, free)))
    return 0


def _demo(args: argparse.Namespace) -> int:
    from mambacache.demo.run import run

    return run(args.device)
