"""Time the first token of each turn in parallel chats, with and without the cache.

    python benchmarks/bench_multiturn.py MODEL [--json OUT.json] [--chats 32] [--turns 8] [--device cuda]
        [--random-weights]

A chat sends its next turn as soon as its answer ends. A prompt holds all earlier turns and a new message. All chats
begin with the same instructions.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from about import about
from random_weights import random_weights
from tqdm import tqdm

from mambacache import LLM, SamplingParams

INSTRUCTIONS, MESSAGE, ANSWER = 512, 256, 64  # tokens
VOCABULARY = range(3, 130)
PARAMS = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


@dataclass
class Row:
    """Holds the seconds to the first token of one turn in all chats."""

    cache: bool
    turn: int
    seconds: float  # the median
    p99: float
    prompt_tokens: int
    hit_tokens: int


def chats(llm: LLM, count: int, turns: int, seed: int, cache: bool) -> list[Row]:
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return rng.choices(VOCABULARY, k=number)

    def ask(chat: int) -> None:
        said[chat] += tokens(MESSAGE)
        running[llm.submit(said[chat], PARAMS)] = chat

    common = tokens(INSTRUCTIONS)
    said = [common[:] for _ in range(count)]
    done: list[list[Any]] = [[] for _ in range(count)]
    running: dict[str, int] = {}
    for chat in range(count):
        ask(chat)
    with tqdm(total=count * turns, desc=f"turns, cache {'on' if cache else 'off'}") as bar:
        while running:
            for output in llm.step():
                if output.finished:
                    chat = running.pop(output.request_id)
                    done[chat].append(output)
                    said[chat] += output.outputs[0].token_ids
                    bar.update()
                    if len(done[chat]) < turns:
                        ask(chat)
    rows = []
    for turn in range(turns):
        outputs = [own[turn] for own in done]
        times = sorted(output.time_to_first_token for output in outputs)
        prompt, hit = (sum(getattr(output.cache, name) for output in outputs) for name in ("prompt", "hit"))
        rows.append(Row(cache, turn + 1, statistics.median(times), times[int(0.99 * (count - 1))], prompt, hit))
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--random-weights", action="store_true", help="read only the model's configuration")
    arguments = parser.parse_args(argv)
    rows: list[Row] = []
    with random_weights(arguments.model) if arguments.random_weights else nullcontext(arguments.model) as checkpoint:
        for cache in (True, False):
            with LLM(checkpoint, device=arguments.device, enable_prefix_caching=cache, seed=0) as llm:
                chats(llm, arguments.chats, 2, seed=1, cache=cache)  # warm-up at the measured sizes
                llm.reset_prefix_cache()
                rows += chats(llm, arguments.chats, arguments.turns, seed=0, cache=cache)
    for row in rows:
        print(
            f"cache {'on' if row.cache else 'off':4} turn {row.turn}: first token after {1e3 * row.seconds:8.1f} ms, "
            f"p99 {1e3 * row.p99:8.1f}, hit {row.hit_tokens / row.prompt_tokens:.0%}"
        )
    if arguments.json:
        figures = about("torch", "transformers") | {"chats": arguments.chats, "rows": list(map(asdict, rows))}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
