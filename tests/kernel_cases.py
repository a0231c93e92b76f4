"""Make plans, pools and comparisons for the tests of the ops; `kernel_ops` holds the ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log as ln
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mambacache import kernels
from mambacache.kernels import StateIndices, StateTensor

CHUNK = 64
Inputs = dict[str, Tensor]  # per token: name -> [tokens, ...]
DtypePairs = tuple[tuple[torch.dtype, torch.dtype], ...]  # (activations, state) that an op supports


@dataclass
class Row:
    """Describe one row of a hand-made step, `context` tokens into its sequence."""

    length: int
    src: int = 0
    dst: int = 0
    context: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)  # position -> block, prefill only
    log_slot: int = 0  # decode only, like log_start, log_end and width
    log_start: int = 0
    log_end: int = 0
    width: int = 1  # least number of tokens, with padding; a step pads all rows to the widest row
    pages: tuple[int, ...] = ()
    kv_held: int = 0  # tokens with keys and values in the pages already

    @property
    def target(self) -> int:
        return self.dst if self.length else 0

    @property
    def stored(self) -> dict[int, int]:
        """Map a number of this prefill row's tokens to the nonzero block that receives the state after them."""
        blocks = {position - self.context: block for position, block in self.checkpoints.items()}
        if self.length:
            blocks[self.length] = self.dst
        return {count: block for count, block in blocks.items() if block}

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield (offset in the row, block) of every chunk."""
        start = 0
        while start < self.length:
            end = min(start + CHUNK - (self.context + start) % CHUNK, self.length)
            yield start, self.stored.get(end, 0)
            start = end


def int32(values: ArrayLike) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def decode_width(rows: Sequence[Row]) -> int:
    return max((max(row.length, row.width) for row in rows), default=1)


def plan_arrays(
    decodes: Sequence[Row], prefills: Sequence[Row], *, num_tokens: int | None = None, block_size: int = 0
) -> dict[str, np.ndarray]:
    """Return the arrays of a StepPlan for these rows, with attention's arrays if `block_size` is given."""
    width = decode_width(decodes)
    starts = len(decodes) * width + np.cumsum([0, *(row.length for row in prefills)])
    table = [
        (index, starts[index] + offset, block) for index, row in enumerate(prefills) for offset, block in row.chunks()
    ]
    counts = [len(list(row.chunks())) for row in prefills]
    arrays = {
        "decode_src": int32([row.src for row in decodes]),
        "decode_len": int32([row.length for row in decodes]),
        "decode_dst": int32([row.dst for row in decodes]),
        "log_slot": int32([row.log_slot for row in decodes]),
        "log_start": int32([row.log_start for row in decodes]),
        "log_end": int32([row.log_end for row in decodes]),
        "query_start_loc": int32(starts),
        "context_len": int32([row.context for row in prefills]),
        "src": int32([row.src for row in prefills]),
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
    """Return the offset of every row's first token in the flat batch."""
    width = decode_width(decodes)
    lengths = [row.length for row in prefills]
    return [*range(0, len(decodes) * width, width), *(len(decodes) * width + np.cumsum([0, *lengths])[:-1]).tolist()]


class Pool:
    """Hold a pool full of NaN: its slots lie apart in a larger buffer, and blocks are handed out in random order."""

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
        poison = torch.nan if dtype.is_floating_point else 0
        self.slab = torch.full((blocks * stride + unit,), poison, dtype=dtype, device=device)
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
        """Return a block that was not taken before. It holds `values`, or NaN."""
        block = next(self._free)
        if values is not None:
            self.state[block] = values.to(self.slab.dtype)
        return block

    def assert_only_written(self, before: Tensor, places: Sequence[int] | Sequence[tuple[int, int]]) -> None:
        """Check that the buffer, gaps included, equals `before` in every bit except these blocks or lines of blocks."""
        written = torch.zeros_like(self.slab, dtype=torch.bool)
        for place in places:
            self.view(written)[place] = True
        assert torch.equal(bits(self.slab)[~written], bits(before)[~written])


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def assert_bitwise(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and torch.equal(bits(actual), bits(expected))


class Op(Protocol):
    """Describe a recurrent op for the tests. `walk` is the oracle: one row, token by token, in float64."""

    name: str
    state_dtypes: DtypePairs
    state_shape: tuple[int, ...]
    exact_state: bool  # the stored state is a copy of inputs
    carries_state: bool  # its log ends with two tensors: a state, and the entry that follows on it, a channel each

    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs: ...

    def run(
        self, inputs: Inputs, state: Tensor, log: Sequence[Tensor], indices: StateIndices, **options: Any
    ) -> Tensor: ...

    def walk(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs and the state after every token, beginning with the state S."""
        ...

    def log_layout(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]: ...

    def entries(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, ...]:
        """Return a token log's entries for its first tokens, in float64, [tokens, ...] each."""
        ...


class Log:
    """Hold a token log for an op over a pool, on the pool's device, with slots full of NaN."""

    def __init__(self, op: Op, pool: Pool, dtype: torch.dtype, slots: int = 32, gap: int = 16) -> None:
        layout = op.log_layout(dtype, pool.slab.dtype)
        device = str(pool.slab.device)
        self.pools = [Pool(each.shape, each.dtype, slots, gap, 7, device) for each in layout]
        self.of_entries = self.pools[:-2] if op.carries_state else self.pools
        self.carried = self.pools[len(self.of_entries) :]

    @property
    def tensors(self) -> list[Tensor]:
        return [pool.state for pool in self.pools]

    def take(
        self, entries: Sequence[Tensor] = (), start: int = 0, states: Sequence[Tensor] = (), drafts: int = 0
    ) -> int:
        """Return a slot that was not taken before, filled by `fill`."""
        slots = [pool.take() for pool in self.pools]  # all pools hand out slots in the same order
        self.fill(slots[0], entries, start, states, drafts)
        return slots[0]

    def fill(
        self, slot: int, entries: Sequence[Tensor], start: int, states: Sequence[Tensor] = (), drafts: int = 0
    ) -> None:
        """Write these entries into a slot, beginning at `start`.

        `states` has the state after each entry. A log that carries a state gets the state before its last `drafts`
        entries, which are accepted drafts. Entries before that state are left out, since nothing may read them.
        """
        end = start + (len(entries[0]) if entries else 0)
        first = max(end - drafts, start + 1) if self.carried and end > start else start
        for pool, values in zip(self.of_entries, entries, strict=False):
            pool.state[slot, first:end] = values[first - start :].to(pool.slab)
        for pool, value in zip(
            self.carried, (states[first - start - 1], first) if self.carried and end > start else (), strict=False
        ):
            pool.state[slot] = value

    def held(self, slot: int, start: int, end: int) -> list[Tensor]:
        """Return a slot's entries from `start` to `end`, and the tensors that it carries."""
        return [pool.state[slot, start:end] for pool in self.of_entries] + [pool.state[slot] for pool in self.carried]

    def slabs(self) -> list[Tensor]:
        return [pool.slab.clone() for pool in self.pools]

    def views(self, slabs: Sequence[Tensor]) -> list[Tensor]:
        return [pool.view(slab) for pool, slab in zip(self.pools, slabs, strict=True)]

    def assert_only_written(self, before: Sequence[Tensor], rows: Sequence[Row]) -> None:
        """Check that only the entries of these rows' tokens, and the tensors that their slots carry, have changed."""
        places = [(row.log_slot, row.log_end + i) for row in rows for i in range(row.length)]
        slots = [row.log_slot for row in rows if row.length]
        for pool, slab in zip(self.pools, before, strict=True):
            pool.assert_only_written(slab, slots if pool in self.carried else places)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


class Recurrence(ABC):
    """Describe an op that computes the state after a token from the state before and that token's inputs alone.

    A subclass gives `name` (of the op), `state_shape`, `parameters` (all but inputs), and the abstract methods.
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
    carries_state = False

    @abstractmethod
    def inputs(self, tokens: int, dtype: torch.dtype, seed: int = 0) -> Inputs: ...

    @abstractmethod
    def walk(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, list[Tensor]]: ...

    @abstractmethod
    def log_layout(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]: ...

    @abstractmethod
    def entries(self, inputs: Inputs, S: Tensor) -> tuple[Tensor, ...]: ...

    def run(
        self,
        inputs: Inputs,
        state: Tensor,
        log: Sequence[Tensor],
        indices: StateIndices,
        library: ModuleType = kernels,
        **options: Any,
    ) -> Tensor:
        parameters = {k: v.to(state.device) if isinstance(v, Tensor) else v for k, v in self.parameters.items()}
        return getattr(library, self.name)(**inputs, **parameters, state=state, log=log, indices=indices, **options)


def sums_of_decays(g: Tensor) -> Tensor:
    """Return the sums that token logs hold for log decays g [tokens, ...]."""
    return (g / ln(2)).clamp(min=-34.6).cumsum(0)


def run_rows(
    op: Op,
    pool: Pool,
    decodes: Sequence[tuple[Row, Inputs]] = (),
    prefills: Sequence[tuple[Row, Inputs]] = (),
    tail: int = 0,
    log: Log | None = None,
) -> list[Tensor]:
    """Run rows with their tokens' inputs as one batch, and return each row's outputs. Padding holds NaN and gives 0.

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
    y = op.run(flat, pool.state, log.tensors if log else (), StateIndices.from_arrays(arrays, device)).cpu()
    assert y.shape[0] == total and not y[padding].any()
    return [y[start : start + row.length] for start, (row, _) in zip(starts, segments, strict=True)]


def part(inputs: Inputs, start: int, stop: int) -> Inputs:
    return {name: value[start:stop] for name, value in inputs.items()}
