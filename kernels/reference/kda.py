"""Implement `kda`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mambacache.plan import CHUNK

from ..indices import StateIndices
from ..logs import inner_dtype
from .chunks import Chunks
from .delta_rule import decode, inverse_norm
from .elementwise import sigmoid, softplus

BLOCK = 16  # tokens


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    out: Tensor | None = None,
    *,
    operand_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `mambacache.kernels.kda`."""
    dtype = inner_dtype(q.dtype, state.dtype)
    rate = torch.exp(A_log.to(dtype))[:, None]
    log_decay = -rate * softplus(g.to(dtype) + dt_bias.to(dtype).view(g.shape[1:]))
    beta = sigmoid(b.to(dtype))
    out = v.new_zeros(v.shape) if out is None else out.zero_()
    if indices.num_decodes:
        decode(q, k, v, log_decay, beta, state, log, indices, out)
    if indices.num_prefills:
        _prefill(q, k, v, log_decay, beta, state, indices, out, operand_dtype)
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
    dtype = g.dtype
    chunks = Chunks.of(indices)
    q, k, v, g, beta = (chunks.pad(x, dtype) for x in (q, k, v, g, beta))
    q = q * inverse_norm(q)[..., None] * q.shape[-1] ** -0.5
    k = k * inverse_norm(k)[..., None]
    qk, kk = _scores(torch.stack([q, k]), k, g, operand_dtype)
    identity = torch.eye(CHUNK, dtype=dtype, device=g.device)
    system = (kk * beta[..., None]).tril(-1)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)

    decay = torch.exp(g.cumsum(-2))
    q_in, k_in, k_out = q * decay, k * decay, k * _decay_to_end(g)
    q_in, k_in, k_out, qk, inverse = (_round(x, operand_dtype) for x in (q_in, k_in, k_out, qk, inverse))
    outputs = torch.empty_like(v)

    def step(states: Tensor, chunk: Tensor) -> Tensor:
        read = _round(states, operand_dtype).mT
        residual = beta[chunk][..., None] * (v[chunk] - k_in[chunk] @ read)
        u = _round(inverse[chunk] @ _round(residual, operand_dtype), operand_dtype)
        outputs[chunk] = q_in[chunk] @ read + qk[chunk] @ u
        return decay[chunk][..., -1:, :] * states + u.mT @ k_out[chunk]

    chunks.scan(state, indices, dtype, step)
    chunks.unpad(outputs, out)


def _scores(rows: Tensor, keys: Tensor, g: Tensor, operand_dtype: torch.dtype | None) -> Tensor:
    """Return products of line i and key j, decayed from j to i; 0 for j > i.

    Decays meet at the start of i's block: they are sums, not differences.
    """
    scores = rows.new_zeros(*rows.shape[:-1], CHUNK)
    for start in range(0, CHUNK, BLOCK):
        block = slice(start, start + BLOCK)
        its_rows, its_keys, its_g = rows[..., block, :], keys[..., block, :], g[..., block, :]
        from_start = _round(its_rows * torch.exp(its_g.cumsum(-2)), operand_dtype)
        to_start = _round(keys[..., :start, :] * _decay_to_end(g[..., :start, :]), operand_dtype)
        scores[..., block, :start] = from_start @ to_start.mT
        scores[..., block, block] = _block_scores(its_rows, its_keys, its_g)
    return scores


def _block_scores(rows: Tensor, keys: Tensor, g: Tensor) -> Tensor:
    """Decay keys line by line."""
    decays, keys = torch.exp(g), keys.clone()
    of_rows = []
    for i in range(BLOCK):
        keys[..., :i, :] *= decays[..., i : i + 1, :]
        of_rows.append((rows[..., i : i + 1, :] * keys).sum(-1))
    return torch.stack(of_rows, dim=-2).tril()


def _decay_to_end(g: Tensor) -> Tensor:
    after = torch.zeros_like(g)
    after[..., :-1, :] = g[..., 1:, :]
    return torch.exp(after.flip(-2).cumsum(-2).flip(-2))


def _round(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Round to the precision of `dtype`, not to its range."""
    if dtype is None:
        return x
    mantissa, exponent = torch.frexp(x)
    steps = 2 / torch.finfo(dtype).eps
    return torch.ldexp((mantissa * steps).round() / steps, exponent)
