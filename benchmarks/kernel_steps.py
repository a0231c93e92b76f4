"""A step of the benchmark: its rows, the blocks that they read and write, and what a case is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from gpu_timing import Call
from kernel_peers import VLLM
from torch import Tensor

from mambacache.kernels import StateIndices, StateTensor
from mambacache.plan import FOLD

PoolCall = Callable[..., Any]  # of a peer, with the pool and the blocks

CONTEXT = 4096  # tokens before a prefill step


class Case(Protocol):
    """One set of inputs of one op. What a call returns and what it stores is compared with `exact`."""

    op: str
    nbytes: int  # that must be read and written
    flops: int  # of products
    exponentials: int

    def ours(self) -> Tensor: ...

    def peers(self) -> dict[str, Call]:
        """By name; of those that are optional only what is installed."""
        ...

    def copy(self) -> Call | None: ...

    def exact(self) -> list[Tensor]: ...

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]: ...


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def int32(values: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def prefill_indices(lengths: Sequence[int], src: np.ndarray, dst: np.ndarray) -> StateIndices:
    """Sequences that continue from CONTEXT tokens, each with one state to store at its end."""
    starts = [0, *accumulate(lengths)]
    cuts = [list(range(start, end, 64)) for start, end in pairwise(starts)]
    chunk_dst = [block * (i == len(row) - 1) for row, block in zip(cuts, dst, strict=True) for i in range(len(row))]
    arrays = {
        "query_start_loc": int32(starts),
        "context_len": int32([CONTEXT] * len(lengths)),
        "src": src,
        "chunk_seq": int32([i for i, row in enumerate(cuts) for _ in row]),
        "chunk_start": int32([start for row in cuts for start in row]),
        "chunk_dst": int32(chunk_dst),
        "seq_chunk_start": int32([0, *accumulate(len(row) for row in cuts)]),
    }
    return StateIndices.from_arrays(arrays, "cuda")


def decode_indices(src: np.ndarray, dst: np.ndarray, starts: np.ndarray, ends: np.ndarray, tokens: int) -> StateIndices:
    """Rows of so many tokens, each with a log of its own; dst is 0 for those that are not folded."""
    rows = len(src)
    arrays = {
        "decode_src": src,
        "decode_len": int32([tokens] * rows),
        "decode_dst": dst,
        "log_slot": np.arange(1, rows + 1, dtype=np.int32),
        "log_start": starts,
        "log_end": ends,
        "query_start_loc": int32([rows * tokens]),
    }
    return StateIndices.from_arrays(arrays, "cuda")


class Steps:
    """Rows of a step and the blocks that they read and write: as many tokens each as `lengths` says.

    Decode is that of a long run: the rows' tokens begin at all entries of their logs alike, and those that fill theirs
    are folded. A peer stores a state after every token: the blocks of `dst` are its.
    """

    def __init__(self, lengths: Sequence[int], *, decode: bool) -> None:
        self.lengths, self.decode = list(lengths), decode
        rows, self.stored = len(lengths), lengths[0] if decode else 1
        blocks = int32(np.random.default_rng(0).permutation(rows * (1 + self.stored)) + 1)
        src, dst = blocks[:rows], blocks[rows:].reshape(rows, -1)
        self.blocks = len(blocks) + 1
        self.tokens, self.rows = sum(lengths), rows
        self.src, self.dst = (torch.tensor(ids, device="cuda") for ids in (src, dst))
        self.logged = self.folds = 0  # entries that are read or written, and rows that are folded
        if not decode:
            self.indices = self.without_logs = prefill_indices(lengths, src, dst[:, -1])
            return
        last = FOLD - self.stored  # the entry from which a row's tokens fill the log
        ends = int32(np.arange(rows) % (last + 1))
        self.ends = torch.tensor(ends, device="cuda")
        self.logged, self.folds = int(ends.sum()) + self.tokens, int((ends == last).sum())
        filled = int32(dst[:, -1] * (ends == last))
        self.indices = decode_indices(src, filled, np.zeros_like(ends), ends, self.stored)
        ends = np.full_like(ends, last)
        self.without_logs = decode_indices(src, dst[:, -1], ends, ends, self.stored)

    @contextmanager
    def as_peers(self) -> Iterator[None]:
        """Decode whose logs are empty, and which stores the state of every row: what it gives, a peer's gives too."""
        kept, self.indices = self.indices, self.without_logs
        yield
        self.indices = kept

    def log(self, layout: Sequence[StateTensor], values: Sequence[float | None]) -> list[Tensor]:
        """Logs of these tensors, each full of one value or, if it is None, of random numbers; none in prefill."""
        log = []
        for each, value in zip(layout if self.decode else (), values, strict=self.decode):
            tensor = torch.empty(self.rows + 1, *each.shape, dtype=each.dtype, device="cuda")
            log.append(tensor.normal_() if value is None else tensor.fill_(value))
        return log


class Recurrence(ABC):
    """A recurrence over a pool of fp32 states: its op takes `tensors`, then the pool, the log and the indices.

    `flops` and `exponentials` are those of one token of a prefill. Errors of decode are those of rows whose logs are
    empty: a peer has none.
    """

    op: str
    peer_in_place = False  # in prefill

    def __init__(
        self,
        function: Callable[..., Tensor],
        steps: Steps,
        tensors: Sequence[Tensor | None],
        state_shape: tuple[int, ...],
        log: list[Tensor],
        output_width: int,
        flops: int = 0,
        exponentials: int = 0,
    ) -> None:
        self.function, self.steps, self.tensors, self.log = function, steps, tensors, log
        self.pool = randn(steps.blocks, *state_shape, dtype=torch.float32)
        self.nbytes = sum(x.nbytes for x in tensors if x is not None) + 2 * steps.tokens * output_width
        self.nbytes += (steps.rows + (steps.folds if steps.decode else steps.rows)) * self.pool[0].nbytes
        self.nbytes += self.log_bytes()
        self.flops, self.exponentials = (0 if steps.decode else steps.tokens * count for count in (flops, exponentials))

    def log_bytes(self) -> int:
        """Of logs, that are read or written."""
        return self.steps.logged * sum(x[0, 0].nbytes for x in self.log)

    def ours(self) -> Tensor:
        return self.function(*self.tensors, self.pool, self.log, self.steps.indices)

    def peers(self) -> dict[str, Call]:
        """Decode is in place: in src, or with drafts in a row of dst. Not all take drafts."""
        steps, pool = self.steps, self.pool
        if not steps.decode:
            return {name: partial(call, pool, steps.src, steps.dst[:, 0]) for name, call in self.peer_prefill().items()}
        decode = self.peer_decode()
        return {} if decode is None else {VLLM: partial(decode, pool, self._peer_blocks().to(torch.int32))}

    @abstractmethod
    def peer_prefill(self) -> dict[str, PoolCall]: ...

    @abstractmethod
    def peer_decode(self) -> PoolCall | None: ...

    def _peer_blocks(self) -> Tensor:
        return self.steps.dst if self.steps.stored > 1 else self.steps.src[:, None]

    def copy(self) -> Call | None:
        return None

    def exact(self) -> list[Tensor]:
        pool, log = self.pool.double(), [x.double() if x.is_floating_point() else x.clone() for x in self.log]
        tensors = [x if x is None else x.double() for x in self.tensors]
        return [self.function(*tensors, pool, log, self.steps.without_logs), pool[self.steps.dst[:, -1]]]

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]:
        steps, kept = self.steps, self.pool.clone()
        in_place = of_peer and (steps.decode or self.peer_in_place)
        if in_place and steps.stored > 1:
            self.pool[steps.dst[:, 0]] = self.pool[steps.src]
        with steps.as_peers():
            y = call()
        assert isinstance(y, Tensor)
        written = self.pool[(self._peer_blocks() if in_place else steps.dst)[:, -1]]
        self.pool.copy_(kept)
        return [y, written]
