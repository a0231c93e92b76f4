"""The benchmark's inputs: one class an op, with the work of the op, of its peer and of a mere copy on the same tensors.

Shapes are Qwen3-Next's: 16 key and 32 value heads of 128 x 128, convolution over 8192 channels of width 4, bf16, states
in fp32. Inputs are views of a projection's output, and states rows of a pool, as in a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import kernel_peers
import numpy as np
import torch
from gpu_timing import Call, row_copy
from torch import Tensor

from mambacache.kernels import StateIndices, conv1d, gated_delta_rule, gated_rms_norm

KEY_HEADS, VALUE_HEADS, WIDTH = 16, 32, 128
DIM = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
QUERIES, VALUES = KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH
PROJECTED = DIM + VALUES + 2 * VALUE_HEADS  # queries, keys, values, gate, a, b of a token, in one row of a projection
TAPS = 4
CONTEXT = 4096  # tokens before a prefill step


class Case(Protocol):
    """One set of inputs of one op. What a call returns and what it stores is compared with `exact`."""

    op: str
    nbytes: int  # that must be read and written
    flops: int  # of products

    def ours(self) -> Tensor: ...

    def peer(self) -> Call: ...

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


class DeltaRule:
    op = "gated_delta_rule"

    def __init__(self, lengths: Sequence[int], *, decode: bool = False) -> None:
        self.steps = steps = Steps(lengths, decode=decode)
        self.qkv, projected = randn(steps.tokens, DIM), randn(steps.tokens, PROJECTED)
        sections = self.qkv.split([QUERIES, QUERIES, VALUES], dim=1)
        self.heads = [section.unflatten(1, (-1, WIDTH)) for section in sections]
        self.a, self.b = projected[:, -2 * VALUE_HEADS : -VALUE_HEADS], projected[:, -VALUE_HEADS:]
        self.A_log, self.dt_bias = randn(VALUE_HEADS, dtype=torch.float32), randn(VALUE_HEADS, dtype=torch.float32)
        self.pool = randn(steps.blocks, VALUE_HEADS, WIDTH, WIDTH, dtype=torch.float32)
        token_bytes = 2 * (DIM + VALUES + 2 * VALUE_HEADS)
        self.nbytes = steps.tokens * token_bytes + steps.rows * (1 + steps.stored) * self.pool[0].nbytes
        states = 6 * WIDTH * WIDTH + 4 * 64 * WIDTH  # k S, q S, k^T u and two products with a 64 x 64 triangle
        self.flops = 0 if decode else steps.tokens * (VALUE_HEADS * states + KEY_HEADS * 4 * 64 * WIDTH)

    def ours(self) -> Tensor:
        return gated_delta_rule(*self.heads, self.a, self.b, self.A_log, self.dt_bias, self.pool, self.steps.indices)

    def peer(self) -> Call:
        steps, pool = self.steps, self.pool
        heads = (KEY_HEADS, VALUE_HEADS, WIDTH, WIDTH)
        gates = self.a.contiguous(), self.b.contiguous()
        parameters = self.A_log, self.dt_bias, heads
        if steps.decode:
            decode = kernel_peers.delta_rule_decode(self.qkv, *gates, *parameters, steps.rows)
            # It reads and writes in place, and a row with drafts reads its first block.
            blocks = (steps.dst if steps.stored > 1 else steps.src[:, None]).to(torch.int32)
            return lambda: decode(pool, blocks)
        prefill = kernel_peers.delta_rule_prefill(self.qkv, *gates, *parameters, steps.lengths)
        return lambda: prefill(pool, steps.src, steps.dst[:, 0])

    def copy(self) -> Call | None:
        if not self.steps.decode or self.steps.stored > 1:
            return None
        return row_copy(self.pool, self.steps.src, self.steps.dst[:, 0], self.pool[0].nbytes)

    def exact(self) -> list[Tensor]:
        pool, inputs = self.pool.double(), [x.double() for x in (*self.heads, self.a, self.b)]
        y = gated_delta_rule(*inputs, self.A_log, self.dt_bias, pool, self.steps.indices)
        return [y, pool[self.steps.dst]]

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]:
        steps, kept = self.steps, self.pool.clone()
        blocks = steps.dst
        if of_peer and steps.decode and steps.stored == 1:
            blocks = steps.src[:, None]
        elif of_peer and steps.decode:
            self.pool[steps.dst[:, 0]] = self.pool[steps.src]
        y = call()
        assert isinstance(y, Tensor)
        written = self.pool[blocks]
        self.pool.copy_(kept)
        return [y, written]


class Conv1d:
    op = "conv1d"
    flops = 0

    def __init__(self, lengths: Sequence[int], *, decode: bool = False, peer_builds_metadata: bool = False) -> None:
        self.steps = steps = Steps(lengths, decode=decode)
        self.peer_builds_metadata = peer_builds_metadata
        self.x = randn(steps.tokens, PROJECTED)[:, :DIM]
        self.weight = randn(DIM, TAPS)
        self.pool = randn(steps.blocks, TAPS - 1, DIM)
        self.nbytes = 2 * steps.tokens * 2 * DIM + 2 * steps.rows * self.pool[0].nbytes

    def ours(self) -> Tensor:
        return conv1d(self.x, self.weight, None, self.pool, self.steps.indices)

    def peer(self) -> Call:
        blocks = self.steps.src.to(torch.int32)
        if self.steps.decode:
            decode = kernel_peers.conv_decode(self.x, self.weight)
            return lambda: decode(self.pool, blocks)
        prefill = kernel_peers.conv_prefill(
            self.x, self.weight, self.steps.lengths, build_metadata=self.peer_builds_metadata
        )
        return lambda: prefill(self.pool, blocks)

    def copy(self) -> Call:
        if self.steps.decode:  # of a window and a token
            rows = torch.zeros(self.steps.blocks, TAPS, DIM, dtype=torch.bfloat16, device="cuda")
            return row_copy(rows, self.steps.src, self.steps.dst[:, 0], rows[0].nbytes)
        source = self.x.contiguous()
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def exact(self) -> list[Tensor]:
        return [conv1d(self.x.double(), self.weight.double(), None, self.pool.double(), self.steps.indices)]

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]:
        kept = self.pool.clone()
        y = call()
        self.pool.copy_(kept)
        assert isinstance(y, Tensor)
        return [y]


class GatedNorm:
    op = "gated_rms_norm"
    flops = 0

    def __init__(self, tokens: int) -> None:
        projected = randn(tokens, PROJECTED)
        self.gate = projected[:, DIM : DIM + VALUES].unflatten(1, (VALUE_HEADS, WIDTH))
        self.x, self.weight = randn(tokens, VALUE_HEADS, WIDTH), randn(WIDTH)
        self.nbytes = 3 * self.x.nbytes

    def ours(self) -> Tensor:
        return gated_rms_norm(self.x, self.gate, self.weight, 1e-6, round_normed=False)  # its peer rounds once, too

    def peer(self) -> Call:
        call = kernel_peers.gated_norm(self.x, self.gate, self.weight, 1e-6)
        return lambda: call()

    def copy(self) -> Call | None:
        return None

    def exact(self) -> list[Tensor]:
        return [gated_rms_norm(self.x.double(), self.gate.double(), self.weight.double(), 1e-6)]

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]:
        y = call()
        assert isinstance(y, Tensor)
        return [y]
