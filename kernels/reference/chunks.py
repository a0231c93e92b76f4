"""The chunk table of a step's prefill rows, laid out for vectorised work: every chunk padded to 64 slots."""

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
    """C chunks of 64 slots, filled from the front: products of other sizes would round differently."""

    count: int
    token: Tensor  # [n] offset in the flat batch of every prefill token
    slot: Tensor  # [n] its place among C * 64 slots
    last: Tensor  # [C] offset in the flat batch of every chunk's last token

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
        """[F, heads, ...] to [C, heads, 64, ...] with zeros in empty slots."""
        slots = torch.zeros(self.count * CHUNK, *x.shape[1:], dtype=dtype, device=x.device)
        slots[self.slot] = x[self.token].to(dtype)
        return slots.view(self.count, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()

    def unpad(self, y: Tensor, out: Tensor) -> None:
        """Writes [C, heads, 64, ...] to the prefill tokens of `out` [F, heads, ...]."""
        out[self.token] = y.transpose(1, 2).reshape(self.count * CHUNK, *out.shape[1:])[self.slot].to(out.dtype)

    def scan(
        self, state: Tensor, indices: StateIndices, dtype: torch.dtype, step: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Carries every row's state from its src through its chunks in order, and stores it where `chunk_dst` says.

        `step(states [n, ...], chunks [n])` returns the states after those chunks, one of each row that has chunks left.
        A state is rounded to the pool's dtype after every chunk, stored or not, so that storing it changes nothing.
        """
        first, end = indices.seq_chunk_start[:-1], indices.seq_chunk_start[1:]
        counts, order = (end - first).sort(descending=True, stable=True)  # rows with chunks left are then a prefix
        first = first[order]
        states = read_states(state, indices.src[order], dtype)
        for index in range(int(counts[0])):
            rows = int((counts > index).sum())
            chunks = first[:rows] + index
            states = step(states[:rows], chunks).to(state.dtype)
            write_states(state, indices.chunk_dst[chunks], states)
            states = states.to(dtype)
