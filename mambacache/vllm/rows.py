"""Rows on their way from scheduler to workers: as columns, and only those that changed.

Workers order the batch themselves, so that rows travel and not arrays. A decode row that goes on in place needs nothing
but its name, which vLLM sends anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mambacache.plan import SequenceStep


class Columns(NamedTuple):
    """The changed rows of a step: `names[i]` has `numbers[i]` = start, num_tokens, prefill, src, dst; `checkpoints`
    [n, 3] are index of the row, position, block."""

    names: list[str]
    numbers: np.ndarray
    checkpoints: np.ndarray


class Sender:
    """The scheduler's end."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, int]] = {}  # src and dst of decode rows that workers know

    def columns(self, steps: Sequence[SequenceStep], finished: Iterable[str]) -> Columns:
        """What workers lack of the rows of a step, in which those of `finished` requests end."""
        for name in finished:
            self._sent.pop(name, None)
        changed: list[SequenceStep] = []
        for step in steps:
            blocks = (step.src, step.dst[0])
            if step.prefill:
                self._sent.pop(step.request_id, None)
            elif self._sent.get(step.request_id) == blocks:
                continue
            else:
                self._sent[step.request_id] = blocks
            changed.append(step)
        numbers = [(step.start, step.num_tokens, step.prefill, step.src, step.dst[0]) for step in changed]
        checkpoints = [(i, *item) for i, step in enumerate(changed) for item in step.checkpoints.items()]
        return Columns(
            [step.request_id for step in changed],
            np.array(numbers, np.int32).reshape(-1, 5),
            np.array(checkpoints, np.int32).reshape(-1, 3),
        )


class Receiver:
    """A worker's end: the last row of every request."""

    def __init__(self) -> None:
        self.rows: dict[str, SequenceStep] = {}

    def take(self, columns: Columns, finished: Iterable[str]) -> None:
        for name in finished:
            self.rows.pop(name, None)
        checkpoints: dict[int, dict[int, int]] = {}
        for i, position, block in columns.checkpoints.tolist():
            checkpoints.setdefault(i, {})[position] = block
        for i, (name, row) in enumerate(zip(columns.names, columns.numbers.tolist(), strict=True)):
            start, num_tokens, prefill, src, dst = row
            self.rows[name] = SequenceStep(
                name, 0, 0, start, num_tokens, bool(prefill), True, src, src, 0, (dst,), (), checkpoints.get(i, {})
            )
