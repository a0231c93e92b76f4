"""Lay out prefill chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mambacache.plan import CHUNK

from ..indices import StateIndices
from .states import read_states, write_states


@dataclass
class Chunks:
    """Hold chunks padded to 64 slots: products of other sizes would round differently."""

    count: int
    token: Tensor  # [n] flat offsets of prefill tokens
    slot: Tensor  # [n] their slots
    last: Tensor  # [C] flat offsets of last tokens

    @classmethod
    def of(cls, indices: StateIndices) -> Chunks:
        count = int(indices.seq_chunk_start[-1])
        start, row = indices.chunk_start[:count], indices.chunk_seq[:count]
        position = indices.context_len[row] + start - indices.query_start_loc[row]
        length = torch.minimum(CHUNK - position % CHUNK, indices.query_start_loc[row + 1] - start)
        offset = torch.arange(CHUNK, device=start.device)
        filled = offset < length[:, None]
        slot = torch.arange(count, device=start.device)[:, None] * CHUNK + offset
        return cls(count, (start[:, None] + offset)[filled], slot[filled], start + length - 1)

    def pad(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [C, heads, 64, ...]."""
        slots = torch.zeros(self.count * CHUNK, *x.shape[1:], dtype=dtype, device=x.device)
        slots[self.slot] = x[self.token].to(dtype)
        return slots.view(self.count, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()

    def unpad(self, y: Tensor, out: Tensor) -> None:
        out[self.token] = y.transpose(1, 2).reshape(self.count * CHUNK, *out.shape[1:])[self.slot].to(out.dtype)

    def scan(
        self, state: Tensor, indices: StateIndices, dtype: torch.dtype, step: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Carry states through chunks: `step(states, chunks)` returns the states after them, rounded, stored or not."""
        first, end = indices.seq_chunk_start[:-1], indices.seq_chunk_start[1:]
        counts, order = (end - first).sort(descending=True, stable=True)
        first = first[order]
        states = read_states(state, indices.src[order], dtype)
        for index in range(int(counts[0])):
            rows = int((counts > index).sum())
            chunks = first[:rows] + index
            states = step(states[:rows], chunks).to(state.dtype)
            write_states(state, indices.chunk_dst[chunks], states)
            states = states.to(dtype)
