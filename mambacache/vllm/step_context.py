"""Share pools and indices among layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mambacache.kernels import DecodeBuffers, StateIndices, StatePool, pack_arrays, place_decodes
from mambacache.plan import FOLD, SequenceStep, after_fold, decode_arrays, layout
from mambacache.vllm.rows import Columns, Receiver


class Order(NamedTuple):
    """Maps between vLLM's batch and the indices' flat batch."""

    taken: Tensor  # int32 [F], batch places
    back: Tensor  # int32, the reverse


class StepContext:
    """Holds pools and the step's indices.

    Runs without a plan (profiling, warm-up) prefill from null to null.
    """

    def __init__(self, layers: Sequence[Any], pool: StatePool, logs: StatePool, max_rows: int) -> None:
        self._device = pool.buffer.device
        self._receiver = Receiver()
        self._columns: Columns | None = None  # None: no rows
        self._indices: StateIndices | None = None
        self.order: Order | None = None  # None: same order
        self._null: dict[int, StateIndices] = {}
        self._null_order: Order | None = None
        self._filled: StateIndices | None = None  # one-token rows as of step `_number`
        self._names: list[str] = []  # of `_filled`
        self._places: dict[str, int] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._number = 0
        self._late = False
        self._steady = False  # no late row or fold: the device agrees with `_arrays`
        self.pool, self.logs = pool, logs
        for layer, states, log in zip(layers, pool.layers, logs.layers, strict=True):
            layer.bind_states(self, states, log)
        self._max_rows = max_rows
        self._buffers: dict[int, DecodeBuffers] = {}  # by tokens of a row

    def receive(self, columns: Columns | None, finished: Sequence[str]) -> None:
        self._columns = columns
        if columns is not None:
            self._receiver.take(columns, finished)

    def begin(
        self,
        names: Sequence[str],
        lengths: np.ndarray,
        padded: tuple[int, int] | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Make the next step's indices.

        Args:
            lengths: tokens of rows, even beyond the end of a log.
            padded: decode rows and tokens of a full graph.
            positions: batch positions on the device, for late rows.
        """
        names = list(names) if self._columns is not None else []
        self._indices, self.order = None, self._null_order
        if padded is not None:
            rows, width = padded[0], padded[1] // padded[0]
            self._indices = self._fill(names, rows, width)
            if self._late and positions is not None:
                place_decodes(self._indices, positions[: padded[1] : width])
            return
        self._filled = None
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
        if positions is not None and any(step.unplaced_by for step in steps):
            taken = slice(decodes * width) if self.order is None else self.order.taken[: decodes * width]
            place_decodes(self._indices, positions[taken][::width])

    def _order_of(self, lengths: np.ndarray, decode: np.ndarray, width: int) -> Order:
        starts = np.cumsum(lengths) - lengths
        rows = np.argsort(~decode, kind="stable")
        padded = np.where(decode[rows], width, lengths[rows])
        ours = np.cumsum(padded) - padded
        place = np.arange(padded.sum()) - np.repeat(ours, padded)
        real = place < np.repeat(lengths[rows], padded)
        taken = np.where(real, np.repeat(starts[rows], padded) + place, 0)
        back = np.empty(lengths.sum(), np.int32)
        back[taken[real]] = np.flatnonzero(real)
        return Order(**pack_arrays({"taken": taken.astype(np.int32), "back": back}, self._device))

    def _fill(self, names: list[str], rows: int, width: int) -> StateIndices:
        """Fill buffers; rows that moved by a token advance on the device."""
        filled, further = self._filled, self._receiver.number - self._number
        self._filled, self._number = None, self._receiver.number
        if filled is not None and width == 1 and filled.num_decodes == rows and names == self._names:
            columns, arrays = self._columns, self._arrays
            arrays["log_end"] += further
            if self._steady and (columns is None or not columns.names):
                filled.log_end[: len(names)] += further
                filled.derived.clear()
                self._filled = filled
                return filled
            folded = ((arrays["decode_dst"] != 0) & (arrays["late_len"] == 0)).astype(np.int32)
            end = arrays["log_end"]
            after = after_fold(folded, arrays["decode_src"], arrays["decode_dst"], arrays["log_start"], end)
            arrays["decode_src"], arrays["decode_dst"], arrays["log_start"] = after
            arrays["log_end"] = np.where(folded, end % FOLD, end)
            if columns is not None:
                places = [self._places[name] for name in columns.names]
                for name, values in decode_arrays(columns.numbers[:, 1:]).items():
                    arrays[name][places] = values
        else:
            steps = [self._receiver.row(name) for name in names]
            self._names, self._arrays = names, layout(steps, len(steps), width)
            self._places = {name: place for place, name in enumerate(names)}
        if width not in self._buffers:
            self._buffers[width] = StateIndices.decode_buffers(self._max_rows, width, self._device)
        indices = self._buffers[width].fill(self._arrays, rows)
        self._late = bool(self._arrays["late_len"].any())
        self._steady = not self._late and not self._arrays["decode_dst"].any()
        self._filled = indices if width == 1 else None
        return indices

    @contextmanager
    def warming(self, rows: Sequence[SequenceStep], gathered: bool) -> Iterator[int]:
        """Let runs without a plan take these rows, with other strides if `gathered`."""
        decodes = [row for row in rows if not row.prefill]
        indices = StateIndices.from_arrays(layout(rows, len(decodes)), self._device)
        if any(row.unplaced_by for row in decodes):
            place_decodes(indices, torch.zeros(len(decodes), dtype=torch.int64, device=self._device))
        self._null = {indices.num_tokens: indices}
        if gathered:
            places = np.arange(indices.num_tokens, dtype=np.int32)
            self._null_order = Order(**pack_arrays({"taken": places, "back": places}, self._device))
        yield indices.num_tokens
        self._null, self._null_order = {}, None

    def indices(self, num_tokens: int) -> StateIndices:
        if self._indices is not None:
            return self._indices
        if num_tokens not in self._null:
            row = SequenceStep("", 0, 0, 0, num_tokens, True, False, 0, 0)
            self._null = {num_tokens: StateIndices.from_arrays(layout([row], 0), self._device)}
        return self._null[num_tokens]

    def end(self) -> None:
        self._indices = self.order = self._columns = None
