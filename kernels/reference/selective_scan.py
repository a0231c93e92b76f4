"""Selective scan over a mixed batch, in plain torch: chunked in prefill, token by token in decode."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indices import StateIndices
from .chunks import CHUNK, Chunks
from .elementwise import silu, softplus
from .states import computed_tokens, inner_dtype, walk_decodes


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    indices: StateIndices,
    out: Tensor | None = None,
) -> Tensor:
    """See `mambacache.kernels.selective_scan`."""
    dtype = inner_dtype(x.dtype, state.dtype)
    dt = softplus(dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype))
    A, B, C = A.to(dtype), B.to(dtype), C.to(dtype)
    u = dt * x.to(dtype)
    y = torch.zeros_like(u)
    if indices.num_decodes:
        _decode(u, dt, A, B, C, state, indices, y)
    if indices.num_prefills:
        _prefill(u, dt, A, B, C, state, indices, y)
    y += D.to(dtype) * x.to(dtype)
    if z is not None:
        y *= silu(z.to(dtype))
    y = torch.where(computed_tokens(indices)[:, None], y, 0).to(x.dtype)
    return y if out is None else out.copy_(y)


def _advance(states: Tensor, u: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """States [n, dim, N] one token on, with u = dt x and dt [n, dim] and B [n, N]."""
    return torch.exp(dt[..., None] * A) * states + u[..., None] * B[:, None, :]


def _read(states: Tensor, C: Tensor) -> Tensor:
    return (states * C[:, None, :]).sum(-1)


def _decode(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, indices: StateIndices, y: Tensor
) -> None:
    shape = indices.num_decodes, indices.tokens_per_decode
    u, dt, B, C, y = (each[: shape[0] * shape[1]].unflatten(0, shape) for each in (u, dt, B, C, y))

    def step(states: Tensor, t: int) -> Tensor:
        states = _advance(states, u[:, t], dt[:, t], A, B[:, t])
        y[:, t] = _read(states, C[:, t])
        return states

    walk_decodes(state, indices, u.dtype, step)


def _prefill(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, indices: StateIndices, y: Tensor
) -> None:
    """All chunks at once, twice: from zeros, for what each adds to a state, and from their starts, for the outputs.

    Between the two, states are carried from chunk to chunk; the decay over a chunk is exp(A sum dt).
    """
    chunks = Chunks.of(indices)
    if not chunks.count:
        return
    u, dt, B, C = (chunks.pad(each[:, None], u.dtype).squeeze(1) for each in (u, dt, B, C))  # [chunks, 64, ...]
    added = u.new_zeros(chunks.count, *state.shape[1:])
    elapsed = torch.zeros_like(dt[:, 0])
    for t in range(CHUNK):
        added = _advance(added, u[:, t], dt[:, t], A, B[:, t])
        elapsed += dt[:, t]
    decay = torch.exp(elapsed[..., None] * A)
    starts = torch.empty_like(added)

    def step(states: Tensor, chunk: Tensor) -> Tensor:
        starts[chunk] = states
        return decay[chunk] * states + added[chunk]

    chunks.scan(state, indices, u.dtype, step)
    outputs = torch.empty_like(u)
    states = starts
    for t in range(CHUNK):
        states = _advance(states, u[:, t], dt[:, t], A, B[:, t])
        outputs[:, t] = _read(states, C[:, t])
    chunks.unpad(outputs[:, None], y[:, None])
