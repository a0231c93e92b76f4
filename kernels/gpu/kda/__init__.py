"""Run Kimi Delta Attention over a mixed batch: two launches for decode rows, two for prefill rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...indices import StateIndices
from ..common.delta_decode import decode
from ..common.layout import check_dense, clear_from
from .fold import fold
from .prefill import prefill


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
) -> Tensor:
    """See `mambacache.kernels.kda`. Parameters and the last dim of q, k, v and g are dense."""
    dt_bias = dt_bias.view(-1)
    check_dense(q=q, k=k, v=v, g=g, A_log=A_log, dt_bias=dt_bias)
    out = v.new_empty(v.shape) if out is None else out
    if not len(out):
        return out
    if indices.num_decodes:
        decode(q, k, v, g, b, A_log, dt_bias, state, log, indices, 1.0, out)
        fold(k, v, state, log, indices)
    if indices.num_prefills:
        prefill(q, k, v, g, b, A_log, dt_bias, state, indices, out)
    else:
        clear_from(out, indices.num_decodes * indices.tokens_per_decode)
    return out
