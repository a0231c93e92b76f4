"""A step of the benchmark: its rows, the blocks that they read and write, and what a case is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from gpu_timing import Call, row_copy
from kernel_peers import VLLM
from torch import Tensor

from mambacache.kernels import StateIndices

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
        "conv_src": src,
        "conv_offset": int32([0] * len(lengths)),
        "chunk_seq": int32([i for i, row in enumerate(cuts) for _ in row]),
        "chunk_start": int32([start for row in cuts for start in row]),
        "chunk_dst": int32(chunk_dst),
        "seq_chunk_start": int32([0, *accumulate(len(row) for row in cuts)]),
    }
    return StateIndices.from_arrays(arrays, "cuda")


def decode_indices(src: np.ndarray, dst: np.ndarray) -> StateIndices:
    rows = len(src)
    arrays = {
        "decode_src": src,
        "decode_len": int32([dst.size // rows] * rows),
        "decode_dst": dst.reshape(rows, -1),
        "decode_conv_src": src,
        "decode_conv_offset": int32([0] * rows),
        "decode_boundary_index": int32([-1] * rows),
    }
    return StateIndices.from_arrays(arrays, "cuda")


class Steps:
    """Rows of a step and the blocks that they read and write: as many tokens each as `lengths` says."""

    def __init__(self, lengths: Sequence[int], *, decode: bool) -> None:
        self.lengths, self.decode = list(lengths), decode
        rows, self.stored = len(lengths), lengths[0] if decode else 1
        blocks = int32(np.random.default_rng(0).permutation(rows * (1 + self.stored)) + 1)
        src, dst = blocks[:rows], blocks[rows:]
        self.blocks = len(blocks) + 1
        self.indices = decode_indices(src, dst) if decode else prefill_indices(lengths, src, dst)
        self.src, self.dst = (torch.tensor(ids, device="cuda") for ids in (src, dst.reshape(rows, -1)))
        self.tokens, self.rows = sum(lengths), rows


class Recurrence(ABC):
    """A recurrence over a pool of fp32 states: its op takes `tensors`, then the pool and the indices.

    `flops` and `exponentials` are those of one token of a prefill.
    """

    op: str
    peer_in_place = False  # in prefill

    def __init__(
        self,
        function: Callable[..., Tensor],
        steps: Steps,
        tensors: Sequence[Tensor | None],
        state_shape: tuple[int, ...],
        output_width: int,
        flops: int = 0,
        exponentials: int = 0,
    ) -> None:
        self.function, self.steps, self.tensors = function, steps, tensors
        self.pool = randn(steps.blocks, *state_shape, dtype=torch.float32)
        self.nbytes = sum(x.nbytes for x in tensors if x is not None) + 2 * steps.tokens * output_width
        self.nbytes += steps.rows * (1 + steps.stored) * self.pool[0].nbytes
        self.flops, self.exponentials = (0 if steps.decode else steps.tokens * count for count in (flops, exponentials))

    def ours(self) -> Tensor:
        return self.function(*self.tensors, self.pool, self.steps.indices)

    def peers(self) -> dict[str, Call]:
        """Decode is in place: in src, or with drafts in a row of dst."""
        steps, pool = self.steps, self.pool
        if not steps.decode:
            return {name: partial(call, pool, steps.src, steps.dst[:, 0]) for name, call in self.peer_prefill().items()}
        return {VLLM: partial(self.peer_decode(), pool, self._peer_blocks().to(torch.int32))}

    @abstractmethod
    def peer_prefill(self) -> dict[str, PoolCall]: ...

    @abstractmethod
    def peer_decode(self) -> PoolCall: ...

    def _peer_blocks(self) -> Tensor:
        return self.steps.dst if self.steps.stored > 1 else self.steps.src[:, None]

    def copy(self) -> Call | None:
        if not self.steps.decode or self.steps.stored > 1:
            return None
        return row_copy(self.pool, self.steps.src, self.steps.dst[:, 0], self.pool[0].nbytes)

    def exact(self) -> list[Tensor]:
        pool, tensors = self.pool.double(), [x if x is None else x.double() for x in self.tensors]
        return [self.function(*tensors, pool, self.steps.indices), pool[self.steps.dst]]

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]:
        steps, kept = self.steps, self.pool.clone()
        in_place = of_peer and (steps.decode or self.peer_in_place)
        if in_place and steps.stored > 1:
            self.pool[steps.dst[:, 0]] = self.pool[steps.src]
        y = call()
        assert isinstance(y, Tensor)
        written = self.pool[self._peer_blocks() if in_place else steps.dst]
        self.pool.copy_(kept)
        return [y, written]
