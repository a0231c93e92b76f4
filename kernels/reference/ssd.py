"""Implement `ssd`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from ..indices import StateIndices
from ..logs import inner_dtype
from .chunks import Chunks
from .decays import chunk_decays
from .log import LoggedStates, entries_before, read_log, sums_of_decays, write_log
from .mamba import gated, step_sizes


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    dt_limit: tuple[float, float] = (0.0, inf),
    out: Tensor | None = None,
    *,
    operand_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `mambacache.kernels.ssd`."""
    dtype = inner_dtype(x.dtype, state.dtype)
    dt = step_sizes(dt.to(dtype), dt_bias).clamp(*dt_limit)
    g = dt * A.to(dtype)
    y = torch.zeros(x.shape, dtype=dtype, device=x.device)
    if indices.num_decodes:
        _decode(x, dt, g, B, C, state, log, indices, y)
    if indices.num_prefills:
        _prefill(x, dt, g, B, C, state, indices, y, operand_dtype)
    return gated(y, x, None if D is None else D[:, None], z, indices, out)


def _decode(
    x: Tensor,
    dt: Tensor,
    g: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    y: Tensor,
) -> None:
    shape, group = (indices.num_decodes, indices.tokens_per_decode), x.shape[1] // B.shape[1]
    x, dt, g, B, C, y = (each[: shape[0] * shape[1]].unflatten(0, shape) for each in (x, dt, g, B, C, y))
    g = sums_of_decays(g, log[-1], indices)
    xs, Bs, sizes, sums = (read_log(each, indices, entries_before(indices), y.dtype) for each in log)
    for each, tokens in zip(log, (x, B, dt, g), strict=True):
        write_log(each, tokens, indices)
    states = LoggedStates(state, indices, sizes[..., None] * xs, Bs.repeat_interleave(group, dim=2), sums[..., None])
    x, B, C = (each.to(y.dtype) for each in (x, B, C))
    B, C = (each.repeat_interleave(group, dim=2) for each in (B, C))
    for t in range(shape[1]):
        product = states.enter(t, B[:, t], g[:, t, :, None])
        states.add(t, dt[:, t, :, None] * x[:, t])
        y[:, t] = product(C[:, t])
    states.fold(state)


def _prefill(
    x: Tensor,
    dt: Tensor,
    g: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    indices: StateIndices,
    y: Tensor,
    operand_dtype: torch.dtype | None,
) -> None:
    """Run the SSD paper's block decomposition."""
    dtype, group = y.dtype, x.shape[1] // B.shape[1]
    chunks = Chunks.of(indices)

    def operand(value: Tensor) -> Tensor:
        return value if operand_dtype is None else value.to(operand_dtype).to(dtype)

    x, dt, g, B, C = (chunks.pad(each, dtype) for each in (x, dt, g, B, C))
    x, B, C = operand(x), operand(B), operand(C)
    from_start, between, to_end = chunk_decays(g)
    scores = operand((C @ B.mT).repeat_interleave(group, dim=1) * between * dt[..., None, :])
    added = operand((to_end * dt)[..., None] * x)
    B, C = B.repeat_interleave(group, dim=1), C.repeat_interleave(group, dim=1)
    outputs = torch.empty_like(x)

    def step(states: Tensor, chunk: Tensor) -> Tensor:
        decays = from_start[chunk][..., None]
        outputs[chunk] = decays * (C[chunk] @ operand(states).mT) + scores[chunk] @ x[chunk]
        return decays[..., -1:, :] * states + added[chunk].mT @ B[chunk]

    chunks.scan(state, indices, dtype, step)
    chunks.unpad(outputs, y)
