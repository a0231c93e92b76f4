"""Run Mamba2's state-space duality over a mixed batch: two launches for decode, one or two for prefill."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from torch import Tensor

from ...indices import StateIndices
from ..common.fold import fold
from ..common.layout import check_dense, clear_from
from .decode import decode
from .prefill import prefill


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
) -> Tensor:
    """See `mambacache.kernels.ssd`. The last dim of x, B, C and z is dense; other strides are free."""
    check_dense(x=x, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    out = x.new_empty(x.shape) if out is None else out
    if not len(out):
        return out
    if indices.num_decodes:
        decode(x, dt, A, B, C, D, z, dt_bias, state, log, indices, dt_limit, out)
        values, keys, step_sizes, sums = log
        fold(state, keys, step_sizes, values, sums, indices)
    if indices.num_prefills:
        prefill(x, dt, A, B, C, D, z, dt_bias, state, indices, dt_limit, out)
    else:
        clear_from(out, indices.num_decodes * indices.tokens_per_decode)
    return out
