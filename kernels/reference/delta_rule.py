"""What the gated delta rule and Kimi Delta Attention share: norms of queries and keys, and the recurrence of decode."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indices import StateIndices
from .states import computed_decode_tokens, walk_decodes

NORM_EPS = 1e-6


def inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1) + NORM_EPS)


def decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, indices: StateIndices, out: Tensor
) -> None:
    """The recurrence itself: g [F, HV, K] has a log decay for every channel, or [F, HV, 1] one for all of them."""
    shape = indices.num_decodes, indices.tokens_per_decode
    tokens = shape[0] * shape[1]
    dtype, group = g.dtype, v.shape[1] // k.shape[1]
    q, k, v, g, beta = (x[:tokens].to(dtype).unflatten(0, shape) for x in (q, k, v, g, beta))
    q = (q * inverse_norm(q)[..., None] * q.shape[-1] ** -0.5).repeat_interleave(group, dim=2)
    k = (k * inverse_norm(k)[..., None]).repeat_interleave(group, dim=2)
    decay = torch.exp(g)
    outputs = torch.empty_like(v)

    def step(states: Tensor, t: int) -> Tensor:
        decayed = decay[:, t, :, None] * states
        u = beta[:, t, :, None] * (v[:, t] - (decayed * k[:, t, :, None]).sum(-1))
        states = decayed + u[..., None] * k[:, t, :, None]
        outputs[:, t] = (states * q[:, t, :, None]).sum(-1)
        return states

    walk_decodes(state, indices, dtype, step)
    computed = computed_decode_tokens(indices)[..., None, None]
    out[:tokens] = torch.where(computed, outputs, 0).flatten(0, 1).to(out.dtype)
