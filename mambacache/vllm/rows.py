"""Send changed rows from the scheduler to workers, as columns.

Workers order the batch, advance decode rows by one token, also after a fold, and move late rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from mambacache.plan import NO_CHECKPOINTS, SequenceStep, after_fold


class Columns(NamedTuple):
    """Holds the changed rows of step `number`."""

    number: int
    names: list[str]
    numbers: np.ndarray  # int32 [n, 8], see `_numbers`
    checkpoints: np.ndarray  # int32 [m, 3]: row index, position and block


_numbers = attrgetter("prefill", "start", "num_tokens", "src", "dst", "log_slot", "log_start", "unplaced_by")


class Sender:
    """Finds changed rows in the scheduler."""

    def __init__(self) -> None:
        self._number = 0
        self._sent: dict[str, tuple[int, ...]] = {}  # decode rows that workers know, start minus step

    def columns(self, steps: Sequence[SequenceStep], finished: Iterable[str]) -> Columns:
        """Return rows that workers lack, and forget `finished` requests."""
        sent = self._sent
        for name in finished:
            sent.pop(name, None)
        number = self._number = self._number + 1
        changed: list[SequenceStep] = []
        for step in steps:
            name = step.request_id
            known = (
                step.num_tokens, step.src, step.dst, step.log_slot, step.log_start, step.unplaced_by,
                step.start - number,
            )  # fmt: skip
            if step.prefill:
                sent.pop(name, None)
            elif sent.get(name) == known:
                continue
            else:
                folded = step.dst > 0 and step.num_tokens == 1 and not step.unplaced_by
                src, dst, log_start = after_fold(folded, step.src, step.dst, step.log_start, step.start + 1)
                sent[name] = step.num_tokens, src, dst, step.log_slot, log_start, step.unplaced_by, step.start - number
            changed.append(step)
        numbers = [_numbers(step) for step in changed]
        checkpoints = [(i, *item) for i, step in enumerate(changed) for item in step.checkpoints.items()]
        return Columns(
            number,
            [step.request_id for step in changed],
            np.array(numbers, np.int32).reshape(-1, 8),
            np.array(checkpoints, np.int32).reshape(-1, 3),
        )


class Receiver:
    """Restores all rows in a worker."""

    def __init__(self) -> None:
        self.number = 0
        self.rows: dict[str, tuple[list[int], int]] = {}  # last numbers and their step
        self._checkpoints: dict[str, dict[int, int]] = {}  # of this step

    def take(self, columns: Columns, finished: Iterable[str]) -> None:
        for name in finished:
            self.rows.pop(name, None)
        self.number = columns.number
        self._checkpoints = {}
        for i, position, block in columns.checkpoints.tolist():
            self._checkpoints.setdefault(columns.names[i], {})[position] = block
        for name, numbers in zip(columns.names, columns.numbers.tolist(), strict=True):
            self.rows[name] = numbers, columns.number

    def row(self, name: str) -> SequenceStep:
        (prefill, start, num_tokens, src, dst, log_slot, log_start, unplaced_by), number = self.rows[name]
        if number < self.number:
            folded = dst > 0 and num_tokens == 1 and not unplaced_by
            src, dst, log_start = after_fold(folded, src, dst, log_start, start + 1)
        return SequenceStep(
            name, 0, 0, start + self.number - number, num_tokens, bool(prefill), True, src, dst, log_slot, log_start,
            checkpoints=self._checkpoints.get(name, NO_CHECKPOINTS), unplaced_by=unplaced_by,
        )  # fmt: skip
