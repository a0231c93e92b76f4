"""Implement `selective_scan`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...indices import StateIndices
from ..common.layout import check_dense, clear_from
from .decode import decode
from .prefill import prefill


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
    """See `mambacache.kernels.selective_scan`. The last dim of every input is dense."""
    check_dense(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    out = x.new_empty(x.shape) if out is None else out
    if not len(out):
        return out
    if indices.num_decodes:
        decode(x, dt, A, B, C, D, z, dt_bias, state, log, indices, out)
    if indices.num_prefills:
        prefill(x, dt, A, B, C, D, z, dt_bias, state, indices, out)
    else:
        clear_from(out, indices.num_decodes * indices.tokens_per_decode)
    return out
