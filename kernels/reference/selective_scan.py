"""Implement `selective_scan`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mambacache.plan import CHUNK

from ..indices import StateIndices
from ..logs import inner_dtype
from .chunks import Chunks
from .log import entries_before, read_log, write_log
from .mamba import gated, step_sizes
from .states import decode_targets, once_a_step, parents, read_states, write_states


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
    log: Sequence[Tensor],
    indices: StateIndices,
    out: Tensor | None = None,
) -> Tensor:
    """See `mambacache.kernels.selective_scan`."""
    dtype = inner_dtype(x.dtype, state.dtype)
    A, C = A.to(dtype), C.to(dtype)
    y = torch.zeros(x.shape, dtype=dtype, device=x.device)
    if indices.num_decodes:
        _decode(x, dt, A, B, C, dt_bias, state, log, indices, y)
    if indices.num_prefills:
        dt = step_sizes(dt.to(dtype), dt_bias)
        _prefill(dt * x.to(dtype), dt, A, B.to(dtype), C, state, indices, y)
    return gated(y, x, D, z, indices, out)


def _advance(states: Tensor, u: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Return states after a token, with u = dt x."""
    return torch.exp(dt[..., None] * A) * states + u[..., None] * B[:, None, :]


def _read(states: Tensor, C: Tensor) -> Tensor:
    return (states * C[:, None, :]).sum(-1)


def _decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    y: Tensor,
) -> None:
    shape = indices.num_decodes, indices.tokens_per_decode
    x, dt, B, C, y = (each[: shape[0] * shape[1]].unflatten(0, shape) for each in (x, dt, B, C, y))
    *entries, carried, stands = log
    for each, tokens in zip(entries, (x, dt, B), strict=True):
        write_log(each, tokens, indices)
    slot, end = indices.log_slot, indices.log_end
    logged = [read_log(each, indices, entries_before(indices), y.dtype) for each in entries]
    known = _carried_on(indices)
    states = torch.where(known[:, None, None], carried[slot], read_states(state, indices.decode_src, y.dtype))
    start = torch.where(known[:, None], stands[slot], end[:, None])
    for entry in range(int(start.min()), int(end.max())):
        advanced = _token(states, [each[:, entry] for each in logged], A, dt_bias)
        inside = (start <= entry) & (entry < end[:, None])
        states = torch.where(inside[..., None], advanced, states)
    after, row = [states], torch.arange(len(states), device=states.device)
    for t in range(shape[1]):
        before = torch.stack(after)[parents(indices)[:, t] + 1, row] if t else states
        after.append(_token(before, [each[:, t].to(y.dtype) for each in (x, dt, B)], A, dt_bias))
        y[:, t] = _read(after[-1], C[:, t])
    sure = (indices.decode_len > 0).nonzero().squeeze(1)
    carried[slot[sure]], stands[slot[sure]] = after[1][sure], (end[sure] + 1)[:, None]
    targets = decode_targets(indices)
    if targets.any():
        write_states(state, targets, torch.stack(after)[indices.decode_len.long(), row])


def _token(states: Tensor, token: Sequence[Tensor], A: Tensor, dt_bias: Tensor | None) -> Tensor:
    x, dt, B = token
    dt = step_sizes(dt, dt_bias)
    return _advance(states, dt * x, dt, A, B)


@once_a_step
def _carried_on(indices: StateIndices) -> Tensor:
    """Return rows with their state in the log."""
    return (indices.log_start < indices.log_end) & (indices.decode_len > 0)


def _prefill(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, indices: StateIndices, y: Tensor
) -> None:
    """Run chunks twice: for the states they add, then for outputs."""
    chunks = Chunks.of(indices)
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
