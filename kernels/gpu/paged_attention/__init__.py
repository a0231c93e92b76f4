"""Implement `paged_attention`."""

from __future__ import annotations

from torch import Tensor

from ...indices import StateIndices
from ..common.decays import LOG2_E
from ..common.layout import check_dense, clear_from
from .decode import decode
from .prefill import prefill
from .write import write_pages


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    indices: StateIndices,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `mambacache.kernels.paged_attention`.

    Strides of q, k and v are not specialised: with heads before tokens they change with the batch.
    """
    check_dense(q=q, k=k, v=v, key_pages=key_pages, value_pages=value_pages)
    out = q.new_empty(*q.shape[:2], v.shape[2]) if out is None else out
    if not len(out):
        return out
    write_pages(k, v, key_pages, value_pages, indices)
    scale = (q.shape[2] ** -0.5 if scale is None else scale) * LOG2_E.value
    if indices.num_decodes:
        decode(q, key_pages, value_pages, indices, scale, out)
    if indices.num_prefills:
        prefill(q, key_pages, value_pages, indices, scale, out)
    else:
        clear_from(out, indices.num_decodes * indices.tokens_per_decode)
    return out
