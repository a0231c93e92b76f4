"""Plans, pools and comparisons for the tests of the ops; `kernel_ops` holds the ops themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mambacache import kernels
from mambacache.kernels import StateIndices

CHUNK = 64
MAX_DRAFTS = 7
Inputs = dict[str, Tensor]  # per token: name -> [tokens, ...]
DtypePairs = tuple[tuple[torch.dtype, torch.dtype], ...]  # (activations, state) that an op supports


@dataclass
class Row:
    """One row of a step by hand: `dst` has a block per token in decode and one in prefill."""

    length: int
    src: int = 0
    dst: tuple[int, ...] = (0,)
    context: int = 0
    conv_src: int | None = None  # None: src
    conv_offset: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)  # position -> block, prefill only
    boundary_index: int = -1  # decode only
    pages: tuple[int, ...] = ()
    kv_held: int = 0  # tokens whose keys and values the pages hold already

    @property
    def window_src(self) -> int:
        return self.src if self.conv_src is None else self.conv_src

    @property
    def stored(self) -> dict[int, int]:
        """Prefill: number of this row's tokens -> nonzero block that receives the state after them."""
        blocks = {position - self.context: block for position, block in self.checkpoints.items()}
        if self.length:
            blocks[self.length] = self.dst[0]
        return {count: block for count, block in blocks.items() if block}

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(offset in the row, block) of every chunk."""
        start = 0
        while start < self.length:
            end = min(start + CHUNK - (self.context + start) % CHUNK, self.length)
            yield start, self.stored.get(end, 0)
            start = end


def int32(values: ArrayLike) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def plan_arrays(
    decodes: Sequence[Row], prefills: Sequence[Row], *, num_tokens: int | None = None, block_size: int = 0
) -> dict[str, np.ndarray]:
    """The arrays of a StepPlan for these rows; those of attention too if `block_size` is given."""
    width = max((len(row.dst) for row in decodes), default=1)
    starts = len(decodes) * width + np.cumsum([0, *(row.length for row in prefills)])
    table = [
        (index, starts[index] + offset, block) for index, row in enumerate(prefills) for offset, block in row.chunks()
    ]
    counts = [len(list(row.chunks())) for row in prefills]
    arrays = {
        "decode_src": int32([row.src for row in decodes]),
        "decode_len": int32([row.length for row in decodes]),
        "decode_dst": int32([[*row.dst, *[0] * (width - len(row.dst))] for row in decodes]).reshape(-1, width),
        "decode_conv_src": int32([row.window_src for row in decodes]),
        "decode_conv_offset": int32([row.conv_offset for row in decodes]),
        "decode_boundary_index": int32([row.boundary_index for row in decodes]),
        "query_start_loc": int32(starts),
        "context_len": int32([row.context for row in prefills]),
        "src": int32([row.src for row in prefills]),
        "conv_src": int32([row.window_src for row in prefills]),
        "conv_offset": int32([row.conv_offset for row in prefills]),
        "chunk_seq": int32([entry[0] for entry in table]),
        "chunk_start": int32([entry[1] for entry in table]),
        "chunk_dst": int32([entry[2] for entry in table]),
        "seq_chunk_start": int32(np.cumsum([0, *counts])),
    }
    total = int(starts[-1]) if num_tokens is None else num_tokens
    if num_tokens is not None:
        arrays["tokens"] = int32([0] * total)
    if block_size:
        arrays |= _attention_arrays([*decodes, *prefills], row_starts(decodes, prefills), total, block_size)
    return arrays


def _attention_arrays(rows: Sequence[Row], starts: Sequence[int], total: int, block_size: int) -> dict[str, np.ndarray]:
    positions, slots = np.zeros(total, np.int32), np.full(total, -1, np.int32)
    for row, start in zip(rows, starts, strict=True):
        for offset in range(row.length):
            position = row.context + offset
            positions[start + offset] = position
            if position >= row.kv_held:
                slots[start + offset] = row.pages[position // block_size] * block_size + position % block_size
    lengths = int32([row.context + row.length if row.length else 0 for row in rows])
    table = {
        "block_table": int32([page for row in rows for page in row.pages]),
        "block_table_start": int32(np.cumsum([0, *(len(row.pages) for row in rows)])),
    }
    return {"positions": positions, "kv_slot": slots, "kv_len": lengths, **table}


def row_starts(decodes: Sequence[Row], prefills: Sequence[Row]) -> list[int]:
    """Offset in the flat batch of every row's first token."""
    width = max((len(row.dst) for row in decodes), default=1)
    lengths = [row.length for row in prefills]
    return [*range(0, len(decodes) * width, width), *(len(decodes) * width + np.cumsum([0, *lengths])[:-1]).tolist()]


class Pool:
    """A pool full of NaN whose rows lie apart in a larger buffer, and whose blocks are handed out in random order."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        blocks: int = 64,
        gap: int = 48,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        size = int(np.prod(shape))
        unit = 16 // dtype.itemsize  # slots start at multiples of 16 bytes
        stride = -(-size // unit) * unit + gap // dtype.itemsize
        self.slab = torch.full((blocks * stride + unit,), torch.nan, dtype=dtype, device=device)
        self.strides = (stride, *torch.empty(shape, device="meta").stride())
        self.shape = (blocks, *shape)
        self.offset = unit
        self._free = iter((np.random.default_rng(seed).permutation(blocks - 1) + 1).tolist())

    @property
    def state(self) -> Tensor:
        return self.view(self.slab)

    def view(self, slab: Tensor) -> Tensor:
        return slab.as_strided(self.shape, self.strides, self.offset)

    def take(self, values: Tensor | None = None) -> int:
        """A block nobody has yet, holding `values`, or NaN."""
        block = next(self._free)
        if values is not None:
            self.state[block] = values.to(self.slab.dtype)
        return block

    def assert_only_written(self, before: Tensor, blocks: Sequence[int]) -> None:
        """All of the buffer outside `blocks`, gaps included, is bitwise what it was in `before`."""
        written = torch.zeros_like(self.slab, dtype=torch.bool)
        self.view(written)[list(blocks)] = True
        assert torch.equal(bits(self.slab)[~written], bits(before)[~written])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def assert_bitwise(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and torch.equal(bits(actual), bits(expected))


class Op(Protocol):
    """What the tests need of a recurrent op. `walk` is the oracle: one row, token by token, in float64."""

    name: str
    state_dtypes: DtypePairs
    state_shape: tuple[int, ...]
    exact_state: bool  # the stored state is a copy of inputs

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs: ...

    def run(self, inputs: Inputs, state: Tensor, indices: StateIndices, **options: Any) -> Tensor: ...

    def walk(self, row: Row, inputs: Inputs, before: Tensor, after: Tensor, decode: bool) -> Tensor: ...

    def final_state(self, state: Tensor, block: int, window_block: int, window_offset: int) -> Tensor:
        """What of a state lives on when drafts were accepted."""
        ...


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


class Recurrence(ABC):
    """An op whose state after a token follows from the state before and that token's inputs alone.

    A subclass gives `name` (of the op), `state_shape`, `parameters` (all that is no input), `inputs` and `recurrence`.
    """

    name: str
    state_shape: tuple[int, ...]
    parameters: dict[str, Any]
    state_dtypes: DtypePairs = (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
    )
    exact_state = False

    @abstractmethod
    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs: ...

    @abstractmethod
    def recurrence(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Outputs and the state after every token, in float64."""

    def run(
        self, inputs: Inputs, state: Tensor, indices: StateIndices, library: ModuleType = kernels, **options: Any
    ) -> Tensor:
        parameters = {k: v.to(state.device) if isinstance(v, Tensor) else v for k, v in self.parameters.items()}
        return getattr(library, self.name)(**inputs, **parameters, state=state, indices=indices, **options)

    def walk(self, row: Row, inputs: Inputs, before: Tensor, after: Tensor, decode: bool) -> Tensor:
        S = before[row.src] if row.src else torch.zeros(self.state_shape, dtype=torch.float64)
        outputs, states = self.recurrence(inputs, S)
        stored = {count: block for count, block in enumerate(row.dst, 1) if block} if decode else row.stored
        for count, block in stored.items():
            after[block] = states[count - 1]
        return outputs

    def final_state(self, state: Tensor, block: int, window_block: int, window_offset: int) -> Tensor:
        return state[block]


def run_rows(
    op: Op,
    pool: Pool,
    decodes: Sequence[tuple[Row, Inputs]] = (),
    prefills: Sequence[tuple[Row, Inputs]] = (),
    tail: int = 0,
) -> list[Tensor]:
    """Runs rows with their tokens' inputs as one batch and returns each row's outputs. Padding holds NaN and gives 0.

    `tail` adds that many padding tokens at the end of the flat batch.
    """
    segments = [*decodes, *prefills]
    decode_rows, prefill_rows = [row for row, _ in decodes], [row for row, _ in prefills]
    starts = row_starts(decode_rows, prefill_rows)
    arrays = plan_arrays(decode_rows, prefill_rows)
    total = int(arrays["query_start_loc"][-1]) + tail
    arrays["tokens"] = int32([0] * total)
    device = pool.slab.device
    flat = {
        name: torch.full((total, *value.shape[1:]), torch.nan, dtype=value.dtype, device=device)
        for name, value in segments[0][1].items()
    }
    padding = torch.ones(total, dtype=torch.bool)
    for start, (row, inputs) in zip(starts, segments, strict=True):
        padding[start : start + row.length] = False
        for name, value in inputs.items():
            flat[name][start : start + row.length] = value
    y = op.run(flat, pool.state, StateIndices.from_arrays(arrays, device)).cpu()
    assert y.shape[0] == total and not y[padding].any()
    return [y[start : start + row.length] for start, (row, _) in zip(starts, segments, strict=True)]


def part(inputs: Inputs, start: int, stop: int) -> Inputs:
    return {name: value[start:stop] for name, value in inputs.items()}
