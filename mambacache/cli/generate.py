"""Run `mambacache generate`: answer prompts as text or JSON."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mambacache.cli.options import given_fields
from mambacache.cli.prompts import Asked, read, tokens_of_chat
from mambacache.config import EngineConfig, SamplingParams
from mambacache.engine.outputs import Completion, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from mambacache.engine.llm import LLM
    from mambacache.engine.prompts import Encoded, Prompt

DEFAULTS = {"temperature": 0.0, "max_tokens": 64}


def run(args: argparse.Namespace) -> int:
    """Answer all prompts; return 1 if any failed."""
    asked = read(args.prompt, args.prompts, DEFAULTS | given_fields(args, SamplingParams))
    if args.stream and any(each.params.n > 1 for each in asked):
        raise ValueError("--stream prints one answer a prompt: leave n at 1")
    config = EngineConfig(args.model, **given_fields(args, EngineConfig))  # fails before torch is loaded
    if all(each.error is not None for each in asked):
        return _print(args, asked, (_refused(str(each.error)) for each in asked))
    from mambacache.engine.llm import LLM

    with LLM(config.model, **given_fields(args, EngineConfig)) as llm:
        return _print(args, asked, _outputs(llm, asked, args.stream))


def _print(args: argparse.Namespace, asked: Sequence[Asked], outputs: Iterable[RequestOutput]) -> int:
    failed = False
    for index, (each, output) in enumerate(zip(asked, outputs, strict=True)):
        failed |= any(answer.error is not None for answer in output.outputs)
        if args.jsonl:
            for answer in output.outputs:
                print(json.dumps(_finite(_as_json(index, each, output, answer)), allow_nan=False))
        else:
            if not args.stream:
                print(*(answer.text for answer in output.outputs), sep="\n")
            print(cache_line(output), file=sys.stderr)
    return 1 if failed else 0


def _outputs(llm: LLM, asked: Sequence[Asked], stream: bool) -> Iterator[RequestOutput]:
    ready = [_encoded(llm, each) for each in asked]
    prompts = [each for each in ready if not isinstance(each, RequestOutput)]
    answered = (print_stream(llm, each) for each in prompts) if stream else iter(llm.generate(prompts))
    for each in ready:
        yield each if isinstance(each, RequestOutput) else next(answered)


def _encoded(llm: LLM, asked: Asked) -> Encoded | RequestOutput:
    if asked.error is not None:
        return _refused(asked.error)
    try:
        prompt: Prompt = tokens_of_chat(llm, asked.prompt) if asked.is_chat else asked.prompt  # type: ignore[arg-type]
        return llm.encoder(prompt, asked.params)
    except ValueError as error:
        return _refused(f"{asked.where}: {error}")


def _refused(error: str) -> RequestOutput:
    return RequestOutput("", [], [Completion(0, finish_reason="error", error=error)], RequestMetrics(time.time()))


def print_stream(llm: LLM, prompt: Encoded) -> RequestOutput:
    output = None
    for output in llm.stream(prompt):
        print(output.outputs[0].delta, end="", flush=True)
    print(flush=True)
    assert output is not None, "a stream ends with an output"
    return output


def cache_line(output: RequestOutput) -> str:
    for answer in output.outputs:
        if answer.error is not None:
            return f"error: {answer.error}"
    cache, first = output.cache, output.time_to_first_token
    assert cache is not None and first is not None, "a finished request ran"
    losses = ", ".join(f"{tokens} {reason}" for reason, tokens in cache.losses.items()) or "none"
    return (
        f"prompt {cache.prompt}, hit {cache.hit} of {cache.ceiling} computed before (lost: {losses}), "
        f"first token after {first * 1e3:.0f} ms"
    )


def _as_json(index: int, asked: Asked, output: RequestOutput, answer: Completion) -> dict[str, Any]:
    cache = output.cache
    line: dict[str, Any] = {
        "index": index,
        "prompt": asked.prompt,
        "answer": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
        "time_to_first_token": output.time_to_first_token,
        "cache": cache and {"prompt": cache.prompt, "hit": cache.hit, "ceiling": cache.ceiling, "losses": cache.losses},
    }
    if answer.logprobs is not None:
        line["logprobs"] = answer.logprobs
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = output.prompt_logprobs
    return line


def _finite(value: Any) -> Any:
    """Replace infinity and NaN with None, as JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
