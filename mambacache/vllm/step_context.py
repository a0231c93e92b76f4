"""What the layers of one model runner share: the pool, and the indices of the step that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mambacache.kernels import StateIndices, StatePool
from mambacache.plan import SequenceStep, layout
from mambacache.vllm.rows import Columns, Receiver


class StepContext:
    """Runs that have no plan (profiling, warm-up of mixed batches) prefill from null to null: kernels are compiled by
    them, and vLLM sees the memory that they take, but no state is read or stored.

    Args:
        layers: the recurrent layers, each with `bind_states(context, views)`.
        pool: their states, layer by layer.
        max_rows: rows of a step, at most.
    """

    def __init__(self, layers: Sequence[Any], pool: StatePool, max_rows: int) -> None:
        self._device = pool.buffer.device
        self._receiver = Receiver()
        self._stepping = False
        self._indices: StateIndices | None = None
        self._null: dict[int, StateIndices] = {}
        self._filled: tuple[list[str], int, StateIndices] | None = None  # whose rows the decode buffers hold, padded
        self.pool = pool
        for layer, views in zip(layers, pool.layers, strict=True):
            layer.bind_states(self, views)
        self._decode = StateIndices.decode_buffers(max_rows, 1, self._device)

    def receive(self, columns: Columns | None, finished: Sequence[str]) -> None:
        """The scheduler's rows of the step that comes; None: it has none."""
        self._stepping = columns is not None
        if columns is not None:
            self._receiver.take(columns, finished)
            if columns.names:
                self._filled = None

    def begin(self, names: Sequence[str], padded_rows: int | None = None) -> None:
        """The step's rows in the order of the batch; with `padded_rows`, for a full graph of so many decode rows."""
        names = list(names) if self._stepping else []
        rows = self._receiver.rows
        steps = [rows[name] for name in names]
        self._indices = None
        if padded_rows is not None:
            if self._filled is None or self._filled[:2] != (names, padded_rows):  # else all go on in place
                indices = self._decode.fill(layout(steps, len(steps)) if steps else {}, padded_rows)
                self._filled = (names, padded_rows, indices)
            self._indices = self._filled[2]
        elif steps:
            decodes = sum([not step.prefill for step in steps])
            self._indices = StateIndices.from_arrays(layout(steps, decodes), self._device)

    def indices(self, num_tokens: int) -> StateIndices:
        """Of the step that runs, for layers that are given so many tokens, padding included."""
        if self._indices is not None:
            return self._indices
        if num_tokens not in self._null:
            row = SequenceStep("", 0, 0, 0, num_tokens, True, False, 0, 0, 0, (0,))
            self._null = {num_tokens: StateIndices.from_arrays(layout([row], 0), self._device)}
        return self._null[num_tokens]

    def end(self) -> None:
        """The forward pass is on the stream."""
        self._indices = None
        self._stepping = False
