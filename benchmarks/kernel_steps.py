"""Define the rows and blocks of a benchmark's step, and the interface of a case."""

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

PoolCall = Callable[..., Any]  # a peer's call with the pool and blocks

CONTEXT = 4096  # tokens before a prefill step


class Case(Protocol):
    """Describes a set of inputs of an op; results and stored states are compared with `exact`."""

    op: str
    nbytes: int  # least bytes read and written
    flops: int
    exponentials: int

    def ours(self) -> Tensor: ...

    def peers(self) -> dict[str, Call]:
        """Return calls of installed peers by name."""
        ...

    def copy(self) -> Call | None: ...

    def exact(self) -> list[Tensor]: ...

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]: ...


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def int32(values: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def prefill_indices(lengths: Sequence[int], src: np.ndarray, dst: np.ndarray) -> StateIndices:
    """Return rows that continue from CONTEXT tokens and store a state at their end."""
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
    """Return rows of `tokens` tokens, each with a log; `dst` is 0 for rows that are not folded."""
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
    """Holds rows with `lengths` tokens, and the blocks that they read and write.

    Decode rows begin at all entries of their logs equally often, as in a long run, and rows with a full log are folded.
    A peer stores a state after every token, in the blocks of `dst`.
    """

    def __init__(self, lengths: Sequence[int], *, decode: bool) -> None:
        self.lengths, self.decode = list(lengths), decode
        rows, self.stored = len(lengths), lengths[0] if decode else 1
        blocks = int32(np.random.default_rng(0).permutation(rows * (1 + self.stored)) + 1)
        src, dst = blocks[:rows], blocks[rows:].reshape(rows, -1)
        self.blocks = len(blocks) + 1
        self.tokens, self.rows = sum(lengths), rows
        self.src, self.dst = (torch.tensor(ids, device="cuda") for ids in (src, dst))
        self.logged = self.folds = 0  # log entries read or written, and folded rows
        if not decode:
            self.indices = self.without_logs = prefill_indices(lengths, src, dst[:, -1])
            return
        last = FOLD - self.stored  # a row that begins here fills its log
        ends = int32(np.arange(rows) % (last + 1))
        self.ends = torch.tensor(ends, device="cuda")
        self.logged, self.folds = int(ends.sum()) + self.tokens, int((ends == last).sum())
        filled = int32(dst[:, -1] * (ends == last))
        self.indices = decode_indices(src, filled, np.zeros_like(ends), ends, self.stored)
        ends = np.full_like(ends, last)
        self.without_logs = decode_indices(src, dst[:, -1], ends, ends, self.stored)

    @contextmanager
    def as_peers(self) -> Iterator[None]:
        """Use empty logs and store the state of every row, so that results compare with a peer's."""
        kept, self.indices = self.indices, self.without_logs
        yield
        self.indices = kept

    def log(self, layout: Sequence[StateTensor], values: Sequence[float | None]) -> list[Tensor]:
        """Return logs filled with `values`, or with random numbers for None; no logs in prefill."""
        log = []
        for each, value in zip(layout if self.decode else (), values, strict=self.decode):
            tensor = torch.empty(self.rows + 1, *each.shape, dtype=each.dtype, device="cuda")
            log.append(tensor.normal_() if value is None else tensor.fill_(value))
        return log


class Recurrence(ABC):
    """Runs a recurrence over a pool of fp32 states; its op takes `tensors`, pool, log and indices.

    `flops` and `exponentials` count one token of a prefill. Errors of decode are measured with empty logs, since a peer
    has no log.
    """

    op: str
    peer_in_place = False  # for prefill

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
        """Return the bytes of logs read or written."""
        return self.steps.logged * sum(x[0, 0].nbytes for x in self.log)

    def ours(self) -> Tensor:
        return self.function(*self.tensors, self.pool, self.log, self.steps.indices)

    def peers(self) -> dict[str, Call]:
        """Return calls of peers; decode works in place, in `src` or with drafts in `dst`; not all peers take drafts."""
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
