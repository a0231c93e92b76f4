"""Share norms and decode between the delta rules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..indices import StateIndices
from .log import LoggedStates, entries_before, read_log, sums_of_decays, write_log
from .states import computed_decode_tokens

NORM_EPS = 1e-6


def inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().sum(-1) + NORM_EPS)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    out: Tensor,
) -> None:
    """Decode with log decays g [F, HV, K], or [F, HV, 1], like the log's sums."""
    shape = indices.num_decodes, indices.tokens_per_decode
    tokens, dtype, group = shape[0] * shape[1], g.dtype, v.shape[1] // k.shape[1]
    q, k, v, g, beta = (x[:tokens].to(dtype).unflatten(0, shape) for x in (q, k, v, g, beta))
    log_k, log_norm, log_u, log_sums = log
    norm = inverse_norm(k)
    g = sums_of_decays(g, log_sums, indices)
    log_keys, norms, us, sums = (read_log(each, indices, entries_before(indices), dtype) for each in log)
    keys = (log_keys * norms[..., None]).repeat_interleave(group, dim=2)
    states = LoggedStates(state, indices, us, keys, sums)
    write_log(log_k, k, indices)
    write_log(log_norm, norm, indices)
    write_log(log_sums, g, indices)
    q = (q * inverse_norm(q)[..., None] * q.shape[-1] ** -0.5).repeat_interleave(group, dim=2)
    k = (k * norm[..., None]).repeat_interleave(group, dim=2)
    u, outputs = torch.empty_like(v), torch.empty_like(v)
    for t in range(shape[1]):
        product = states.enter(t, k[:, t], g[:, t])
        u[:, t] = beta[:, t, :, None] * (v[:, t] - product(k[:, t]))
        states.add(t, u[:, t])
        outputs[:, t] = product(q[:, t])
    write_log(log_u, u, indices)
    states.fold(state)
    computed = computed_decode_tokens(indices)[..., None, None]
    out[:tokens] = torch.where(computed, outputs, 0).flatten(0, 1).to(out.dtype)
