"""Make inputs for attention: rows of equal length behind equal contexts, in shuffled pages of 64 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import kernel_peers
import numpy as np
import torch
from gpu_timing import Call
from kernel_peers import VLLM
from kernel_steps import int32, randn
from torch import Tensor

from mambacache.kernels import StateIndices, paged_attention

PAGE = 64


def decode_arrays(rows: int, length: int) -> dict[str, np.ndarray]:
    names = ("decode_src", "decode_dst", "log_slot", "log_start", "log_end")
    lengths = {"decode_len": np.full(rows, length, np.int32), "query_start_loc": int32([rows * length])}
    return dict.fromkeys(names, np.zeros(rows, np.int32)) | lengths


def prefill_arrays(rows: int, length: int, context: int) -> dict[str, np.ndarray]:
    """Return the arrays of prefill rows; `context` is a multiple of 64."""
    chunks = -(-length // 64)
    starts = np.arange(rows + 1) * length
    arrays = {
        "query_start_loc": starts,
        "chunk_seq": np.repeat(np.arange(rows), chunks),
        "chunk_start": (starts[:-1, None] + np.arange(chunks) * 64).ravel(),
        "chunk_dst": np.zeros(rows * chunks),
        "seq_chunk_start": np.arange(rows + 1) * chunks,
        "context_len": np.full(rows, context),
    }
    return {name: array.astype(np.int32) for name, array in (arrays | {"src": np.zeros(rows)}).items()}


class Attention:
    """Holds inputs with `heads` (query heads, key heads) of `width`."""

    op = "paged_attention"

    def __init__(
        self,
        lengths: Sequence[int],
        context: int,
        *,
        heads: tuple[int, int] = (32, 8),
        width: int = 128,
        decode: bool = False,
    ) -> None:
        rows, length, keys = len(lengths), lengths[0], context + lengths[0]
        pages = -(-keys // PAGE)
        self.table = int32(np.random.default_rng(0).permutation(rows * pages) + 1).reshape(rows, pages)
        positions = np.tile(np.arange(context, keys), rows)
        row = np.repeat(np.arange(rows), length)
        arrays = decode_arrays(rows, length) if decode else prefill_arrays(rows, length, context)
        arrays |= {
            "positions": int32(positions),
            "kv_slot": int32(self.table[row, positions // PAGE] * PAGE + positions % PAGE),
            "kv_len": np.full(rows, keys, np.int32),
            "block_table": self.table.ravel(),
            "block_table_start": int32(np.arange(rows + 1) * pages),
        }
        self.indices, self.length = StateIndices.from_arrays(arrays, "cuda"), length
        sections = [heads[0], heads[1], heads[1]]
        self.qkv = randn(rows * length, sum(sections), width).split(sections, dim=1)
        self.pages = [randn(rows * pages + 1, PAGE, heads[1], width) for _ in range(2)]
        pairs = rows * sum(range(context + 1, keys + 1))
        self.nbytes = 2 * width * (2 * rows * keys * heads[1] + 2 * rows * length * (heads[0] + 2 * heads[1]))
        self.flops, self.exponentials = 4 * width * heads[0] * pairs, heads[0] * pairs

    def ours(self) -> Tensor:
        return paged_attention(*self.qkv, *self.pages, self.indices)

    def peers(self) -> dict[str, Call]:
        table = torch.tensor(self.table, device="cuda")
        return {VLLM: kernel_peers.attention(*self.qkv, *self.pages, table, self.indices, self.length)}

    def copy(self) -> Call | None:
        return None

    def exact(self) -> list[Tensor]:
        return [paged_attention(*(x.double() for x in (*self.qkv, *self.pages)), self.indices)]

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]:
        y = call()
        assert isinstance(y, Tensor)
        return [y]
