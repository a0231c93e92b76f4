"""Make batches that compile all kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from mambacache.plan import NULL_BLOCK, SequenceStep

WARM_UP_TOKENS = 4096
"""Tokens of one long prompt. With two or more experts a token they use every kernel of experts."""
LONG_PROMPT = 320
"""Tokens of each of many long prompts, which use another prefill than short prompts."""
UNEVEN = 2048, 32
"""Tokens of a prompt, and one-token prompts beside it, which leave most processors idle."""
MIXED = 70, 3
"""Tokens of the prompts beside decode rows."""


def warm_up_batches(room: int, longest: int, most_rows: int, width: int) -> list[list[SequenceStep]]:
    """Return batches that use every kernel of a step, and no state.

    A batch has at most `room` tokens and `most_rows` rows, a prompt `longest` and a decode row `width` tokens.
    """
    widths = sorted({1, min(width, room)})
    mixes = [([tokens], [*_fitting(MIXED, room - tokens, longest)]) for tokens in widths]
    return [
        *[_rows([], prompts) for prompts in prompts_of_every_form(room, longest, most_rows)],
        *[_rows([tokens], []) for tokens in widths],
        *[_rows(decodes, prompts) for decodes, prompts in mixes if prompts and most_rows > len(prompts)],
    ]


def prompts_of_every_form(room: int, longest: int, most_rows: int) -> list[list[int]]:
    """Return prompt lengths of batches for every form of prefill."""
    longest = min(longest, room)
    rows, length = min(most_rows, room), min(LONG_PROMPT, longest)
    short = min(UNEVEN[1], rows - 1)
    uneven = [min(UNEVEN[0], longest, room - short), *[1] * short]
    return [[min(WARM_UP_TOKENS, longest)], [1] * rows, [length] * min(rows, room // length), uneven]


def _fitting(lengths: Sequence[int], room: int, longest: int) -> Iterator[int]:
    for length in lengths:
        if fitting := min(length, longest, room):
            yield fitting
            room -= fitting


def _rows(decodes: Sequence[int], prompts: Sequence[int]) -> list[SequenceStep]:
    rows = [decode_row(f"decode {i}", tokens, unplaced_by=tokens - 1) for i, tokens in enumerate(decodes)]
    return rows + [prompt_row(f"prompt {i}", tokens) for i, tokens in enumerate(prompts)]


def decode_row(name: str, tokens: int, unplaced_by: int) -> SequenceStep:
    return SequenceStep(
        name, 0, 0, 0, tokens, False, True, NULL_BLOCK, NULL_BLOCK, drafts=(0,) * (tokens - 1), unplaced_by=unplaced_by
    )


def prompt_row(name: str, tokens: int) -> SequenceStep:
    return SequenceStep(name, 0, 0, 0, tokens, True, True, NULL_BLOCK, NULL_BLOCK)


class CompilerThreads(ThreadPoolExecutor):
    """Shows a progress bar of kernels."""

    def __init__(self) -> None:
        super().__init__(os.cpu_count())
        self._bar = tqdm(total=0, desc="kernels", disable=None)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._bar.total += 1
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self._bar.update())
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._bar.close()
