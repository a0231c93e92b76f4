"""What the layers of one model runner share: the pools, and the indices of the step that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from mambacache.kernels import DecodeBuffers, StateIndices, StatePool, pack_arrays, place_decodes
from mambacache.plan import DECODE_ARRAYS, SequenceStep, layout
from mambacache.vllm.rows import Columns, Receiver


class Order(NamedTuple):
    """How a batch and the indices' flat one go together, where they differ: with drafts decode rows may stand anywhere,
    and have any length.

    Args:
        taken: int32 [F], for each token of the indices its place in the batch; any one for padding.
        back: int32, for each token of the batch its place among those.
    """

    taken: Tensor
    back: Tensor


class StepContext:
    """Runs that have no plan (profiling, warm-up of mixed batches) prefill from null to null: kernels are compiled by
    them, and vLLM sees the memory that they take, but no state is read or stored.

    Args:
        layers: the recurrent layers, each with `bind_states(context, states, logs)`.
        pool: their states, layer by layer.
        logs: their token logs.
        max_rows: rows of a step, at most.
    """

    def __init__(self, layers: Sequence[Any], pool: StatePool, logs: StatePool, max_rows: int) -> None:
        self._device = pool.buffer.device
        self._receiver = Receiver()
        self._stepping = False
        self._indices: StateIndices | None = None
        self.order: Order | None = None  # None: the batch is in that of the indices
        self._null: dict[int, StateIndices] = {}
        self._names: list[str] = []  # whose decode rows `_arrays` are, as of step `_number`
        self._arrays: dict[str, np.ndarray] = {}
        self._number = 0
        self._changed: set[str] = set()  # whose rows came for this step
        self.pool, self.logs = pool, logs
        for layer, states, log in zip(layers, pool.layers, logs.layers, strict=True):
            layer.bind_states(self, states, log)
        self._max_rows = max_rows
        self._buffers: dict[int, DecodeBuffers] = {}  # for full graphs, by the tokens of a row

    def receive(self, columns: Columns | None, finished: Sequence[str]) -> None:
        """The scheduler's rows of the step that comes; None: it has none."""
        self._stepping = columns is not None
        if columns is not None:
            self._receiver.take(columns, finished)
            self._changed = set(columns.names)

    def begin(
        self,
        names: Sequence[str],
        lengths: np.ndarray,
        padded: tuple[int, int] | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """The step that comes.

        Args:
            names: its rows in the order of the batch.
            lengths: tokens of each in the batch. Of those a decode row has fewer, where its log ends before.
            padded: for a full graph, of how many decode rows and tokens.
            positions: on the device, of all tokens of the batch; where rows may be late.
        """
        names = list(names) if self._stepping else []
        self._indices = self.order = None
        if padded is not None:
            rows, width = padded[0], padded[1] // padded[0]
            if width not in self._buffers:
                self._buffers[width] = StateIndices.decode_buffers(self._max_rows, width, self._device)
            arrays, late = self._decode_arrays(names, width)
            self._indices = self._buffers[width].fill(arrays, rows)
            if late and positions is not None:
                place_decodes(self._indices, positions[: padded[1] : width])
            return
        self._names = []
        if not names:
            return
        steps = [self._receiver.row(name) for name in names]
        ordered = sorted(steps, key=lambda step: step.prefill)  # stable
        decode = np.array([not step.prefill for step in steps])
        decodes = int(decode.sum())
        width = int(lengths[decode].max(initial=1))
        self._indices = StateIndices.from_arrays(layout(ordered, decodes, width), self._device)
        if ordered != steps or (lengths[decode] != width).any():
            self.order = self._order_of(lengths, decode, width)
        if positions is not None and any(step.late for step in steps):
            taken = slice(decodes * width) if self.order is None else self.order.taken[: decodes * width]
            place_decodes(self._indices, positions[taken][::width])

    def _order_of(self, lengths: np.ndarray, decode: np.ndarray, width: int) -> Order:
        """Of rows that the batch has back to back, in whatever order."""
        starts = np.cumsum(lengths) - lengths
        rows = np.argsort(~decode, kind="stable")
        padded = np.where(decode[rows], width, lengths[rows])
        ours = np.cumsum(padded) - padded  # where each row begins
        place = np.arange(padded.sum()) - np.repeat(ours, padded)  # of each token in its row
        real = place < np.repeat(lengths[rows], padded)
        taken = np.where(real, np.repeat(starts[rows], padded) + place, 0)
        back = np.empty(lengths.sum(), np.int32)
        back[taken[real]] = np.flatnonzero(real)
        return Order(**pack_arrays({"taken": taken.astype(np.int32), "back": back}, self._device))

    def _decode_arrays(self, names: list[str], width: int) -> tuple[dict[str, np.ndarray], bool]:
        """Of decode rows, and whether some are late. Without drafts most are one token further than in the step before,
        and else the same."""
        number = self._receiver.number
        if width == 1 and names and names == self._names:
            self._arrays["log_end"] += number - self._number
            places = [i for i, name in enumerate(names) if name in self._changed]
            steps = [self._receiver.row(names[i]) for i in places]
            if steps:
                arrays = layout(steps, len(steps))
                for array in DECODE_ARRAYS:
                    self._arrays[array][places] = arrays[array]
        else:
            steps = [self._receiver.row(name) for name in names]
            self._names, self._arrays = names, layout(steps, len(steps), width)
        self._number = number
        return self._arrays, any(step.late for step in steps)

    def indices(self, num_tokens: int) -> StateIndices:
        """Of the step that runs, for layers that are given so many tokens, padding included."""
        if self._indices is not None:
            return self._indices
        if num_tokens not in self._null:
            row = SequenceStep("", 0, 0, 0, num_tokens, True, False, 0, 0)
            self._null = {num_tokens: StateIndices.from_arrays(layout([row], 0), self._device)}
        return self._null[num_tokens]

    def end(self) -> None:
        """The forward pass is on the stream."""
        self._indices = self.order = None
        self._stepping = False
