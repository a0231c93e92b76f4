"""Implement `gated_delta_rule`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mambacache.plan import CHUNK

from ..indices import StateIndices
from ..logs import inner_dtype
from .chunks import Chunks
from .decays import chunk_decays
from .delta_rule import decode, inverse_norm
from .elementwise import sigmoid, softplus


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    beta_scale: float = 1.0,
    out: Tensor | None = None,
    *,
    operand_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `mambacache.kernels.gated_delta_rule`."""
    dtype = inner_dtype(q.dtype, state.dtype)
    g = -torch.exp(A_log.to(dtype)) * softplus(a.to(dtype) + dt_bias.to(dtype))
    beta = sigmoid(b.to(dtype)) * beta_scale
    out = v.new_zeros(v.shape) if out is None else out.zero_()
    if indices.num_decodes:
        *others, sums = log
        decode(q, k, v, g[..., None], beta, state, (*others, sums[..., None]), indices, out)
    if indices.num_prefills:
        _prefill(q, k, v, g, beta, state, indices, out, operand_dtype)
    return out


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    indices: StateIndices,
    out: Tensor,
    operand_dtype: torch.dtype | None,
) -> None:
    """Keep norms, gates and decays outside the rounded products."""
    dtype, group = g.dtype, v.shape[1] // k.shape[1]
    chunks = Chunks.of(indices)

    def operand(x: Tensor) -> Tensor:
        return x if operand_dtype is None else x.to(operand_dtype).to(dtype)

    def per_value_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=1)

    q, k, v, g, beta = (chunks.pad(x, dtype) for x in (q, k, v, g, beta))
    q_norm = per_value_head(inverse_norm(q)) * q.shape[-1] ** -0.5
    k_norm = per_value_head(inverse_norm(k))
    q, k = operand(q), operand(k)
    kk, qk = per_value_head(k @ k.mT), per_value_head(q @ k.mT)
    q, k = per_value_head(q), per_value_head(k)

    decay, between, to_end = chunk_decays(g)
    pairwise = between * k_norm[..., None, :]
    to_end = to_end * k_norm
    system = (kk * pairwise * (beta * k_norm)[..., None]).tril(-1)
    identity = torch.eye(CHUNK, dtype=dtype, device=g.device)
    inverse = operand(torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True))
    scores = operand(qk * pairwise)
    outputs = torch.empty_like(v)

    def step(states: Tensor, chunk: Tensor) -> Tensor:
        keys, decays = k[chunk], decay[chunk][..., None]
        read = operand(states).mT
        residual = beta[chunk][..., None] * (v[chunk] - decays * k_norm[chunk][..., None] * (keys @ read))
        u = inverse[chunk] @ operand(residual)
        outputs[chunk] = q_norm[chunk][..., None] * (decays * (q[chunk] @ read) + scores[chunk] @ operand(u))
        return decays[..., -1:, :] * states + operand(to_end[chunk][..., None] * u).mT @ keys

    chunks.scan(state, indices, dtype, step)
    chunks.unpad(outputs, out)
