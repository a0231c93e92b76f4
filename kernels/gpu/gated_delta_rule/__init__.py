"""Run the gated delta rule over a mixed batch: two launches for decode rows, one or two for prefill rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...indices import StateIndices
from ..common.delta_decode import decode
from ..common.fold import fold
from ..common.layout import check_dense, clear_from
from .prefill import prefill


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
) -> Tensor:
    """See `mambacache.kernels.gated_delta_rule`. The last dim of q, k and v is dense; other strides are free."""
    check_dense(q=q, k=k, v=v, A_log=A_log, dt_bias=dt_bias)
    out = v.new_empty(v.shape) if out is None else out
    if not len(out):
        return out
    if indices.num_decodes:
        decode(q, k, v, a, b, A_log, dt_bias, state, log, indices, beta_scale, out)
        keys, norms, us, sums = log
        fold(state, keys, norms, us, sums, indices)
    if indices.num_prefills:
        prefill(q, k, v, a, b, A_log, dt_bias, state, indices, beta_scale, out)
    else:
        clear_from(out, indices.num_decodes * indices.tokens_per_decode)
    return out
