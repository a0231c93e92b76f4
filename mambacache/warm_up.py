"""The batches that an engine runs before its first request, which then waits for no compilation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from mambacache.plan import NULL_BLOCK, SequenceStep

WARM_UP_TOKENS = 4096
"""The tokens of one long prompt. With two experts a token or more, they take all kernels of experts."""
LONG_PROMPT = 320
"""The tokens of each of many long prompts, which take another form of prefill than many short prompts."""
UNEVEN = 2048, 32
"""The tokens of a prompt, and the number of prompts of one token beside it: most processors have little to do."""
MIXED = 70, 3
"""The tokens of the prompts beside decode rows."""


def warm_up_batches(room: int, longest: int, most_rows: int, width: int) -> list[list[SequenceStep]]:
    """Return the rows of batches that take every kernel of a step. They read and store no state.

    The number and the lengths of prompts choose the form of prefill. Decode rows have one token or the most tokens, and
    run alone or beside prompts.

    Args:
        room: the most tokens of a batch.
        longest: the most tokens of a prompt.
        most_rows: the most rows of a batch.
        width: the most tokens of a decode row, from 1 to 8.
    """
    widths = sorted({1, min(width, room)})
    mixes = [([tokens], [*_fitting(MIXED, room - tokens, longest)]) for tokens in widths]
    return [
        *[_rows([], prompts) for prompts in prompts_of_every_form(room, longest, most_rows)],
        *[_rows([tokens], []) for tokens in widths],
        *[_rows(decodes, prompts) for decodes, prompts in mixes if prompts and most_rows > len(prompts)],
    ]


def prompts_of_every_form(room: int, longest: int, most_rows: int) -> list[list[int]]:
    """Return the prompts' tokens in batches that take every form of prefill."""
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
    rows = [decode_row(f"decode {i}", tokens, late=tokens - 1) for i, tokens in enumerate(decodes)]
    return rows + [prompt_row(f"prompt {i}", tokens) for i, tokens in enumerate(prompts)]


def decode_row(name: str, tokens: int, late: int) -> SequenceStep:
    """Return a row of a token and its drafts that reads and stores no state."""
    return SequenceStep(
        name, 0, 0, 0, tokens, False, True, NULL_BLOCK, NULL_BLOCK, drafts=(0,) * (tokens - 1), late=late
    )


def prompt_row(name: str, tokens: int) -> SequenceStep:
    """Return a row of a prompt that reads and stores no state."""
    return SequenceStep(name, 0, 0, 0, tokens, True, True, NULL_BLOCK, NULL_BLOCK)


class CompilerThreads(ThreadPoolExecutor):
    """A thread for each processor, and a bar that shows how many kernels have compiled."""

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
