"""Gated delta rule over a mixed batch, in plain torch: chunked in prefill, token by token in decode."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indices import StateIndices
from .chunks import CHUNK, Chunks
from .elementwise import sigmoid, softplus
from .states import computed_decode_tokens, inner_dtype, read_states, write_states

NORM_EPS = 1e-6
MIN_PAIRWISE_LOG_DECAY = -24.0  # per token; e^-24 is nothing beside 1, and differences of larger sums would cancel


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    indices: StateIndices,
    beta_scale: float = 1.0,
    *,
    operand_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `mambacache.kernels.gated_delta_rule`.

    `operand_dtype` rounds the operands of every product in prefill: what a kernel on tensor cores may lose.
    """
    dtype = inner_dtype(q.dtype, state.dtype)
    g = -torch.exp(A_log.to(dtype)) * softplus(a.to(dtype) + dt_bias.to(dtype))
    beta = sigmoid(b.to(dtype)) * beta_scale
    out = v.new_zeros(v.shape)
    if indices.num_decodes:
        _decode(q, k, v, g, beta, state, indices, out)
    if indices.num_prefills:
        _prefill(q, k, v, g, beta, state, indices, out, operand_dtype)
    return out


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1) + NORM_EPS)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, indices: StateIndices, out: Tensor
) -> None:
    """The recurrence itself. A state is rounded to the pool's dtype after every token, as if each had its own step."""
    shape = indices.num_decodes, indices.tokens_per_decode
    tokens = shape[0] * shape[1]
    dtype, group = g.dtype, v.shape[1] // k.shape[1]
    q, k, v, g, beta = (x[:tokens].to(dtype).unflatten(0, shape) for x in (q, k, v, g, beta))
    q = (q * _inverse_norm(q)[..., None] * q.shape[-1] ** -0.5).repeat_interleave(group, dim=2)
    k = (k * _inverse_norm(k)[..., None]).repeat_interleave(group, dim=2)
    decay = torch.exp(g)
    states = read_states(state, indices.decode_src, dtype)
    outputs = torch.empty_like(v)
    for t in range(shape[1]):
        decayed = decay[:, t, :, None, None] * states
        u = beta[:, t, :, None] * (v[:, t] - (decayed * k[:, t, :, None]).sum(-1))
        states = decayed + u[..., None] * k[:, t, :, None]
        outputs[:, t] = (states * q[:, t, :, None]).sum(-1)
        states = states.to(state.dtype)
        write_states(state, indices.decode_dst[:, t], states)
        states = states.to(dtype)
    computed = computed_decode_tokens(indices)[..., None, None]
    out[:tokens] = torch.where(computed, outputs, 0).flatten(0, 1).to(out.dtype)


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
    """Chunks in the WY form. Norms, gates and decays stay outside the products, whose operands may be rounded."""
    dtype, group = g.dtype, v.shape[1] // k.shape[1]
    chunks = Chunks.of(indices)
    if not chunks.count:
        return

    def operand(x: Tensor) -> Tensor:
        return x if operand_dtype is None else x.to(operand_dtype).to(dtype)

    def per_value_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=1)

    q, k, v, g, beta = (chunks.pad(x, dtype) for x in (q, k, v, g, beta))
    q_norm = per_value_head(_inverse_norm(q)) * q.shape[-1] ** -0.5
    k_norm = per_value_head(_inverse_norm(k))
    q, k = operand(q), operand(k)
    kk, qk = per_value_head(k @ k.mT), per_value_head(q @ k.mT)
    q, k = per_value_head(q), per_value_head(k)

    decay = torch.exp(g.cumsum(-1))  # from the chunk's start to each token
    gates = g.clamp(min=MIN_PAIRWISE_LOG_DECAY).cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    between = (gates[..., :, None] - gates[..., None, :]).masked_fill(later, -torch.inf)
    pairwise = torch.exp(between) * k_norm[..., None, :]
    to_end = torch.exp(gates[..., -1:] - gates) * k_norm
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
