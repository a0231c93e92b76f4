"""Write keys and values to pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.launch import Launcher, index_pointers
from ..common.layout import power_of_2, stride_alignment

TILE = 4096  # elements in flight per program


@triton.jit(do_not_specialize=["k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"])
def _write_pages_kernel(
    k,
    v,
    key_pages,
    value_pages,
    kv_slot,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    K_ALIGNMENT: tl.constexpr,
    V_ALIGNMENT: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write one token to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slot + token)
    if slot < 0:
        return
    page, place = (slot // PAGE).to(tl.int64), slot % PAGE
    key_pages += page * KEY_STRIDES[0] + place * KEY_STRIDES[1]
    value_pages += page * VALUE_STRIDES[0] + place * VALUE_STRIDES[1]
    channel, value = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    for first in range(0, HEADS, BLOCK_H):
        heads = first + tl.arange(0, BLOCK_H)
        k_row = tl.multiple_of(token * k_token_stride + heads.to(tl.int64) * k_head_stride, K_ALIGNMENT)[:, None]
        v_row = tl.multiple_of(token * v_token_stride + heads.to(tl.int64) * v_head_stride, V_ALIGNMENT)[:, None]
        head = heads[:, None]
        mask = (head < HEADS) & (channel < D)
        x = tl.load(k + k_row + channel, mask=mask)
        tl.store(key_pages + head * KEY_STRIDES[2] + channel, x.to(key_pages.dtype.element_ty), mask=mask)
        mask = (head < HEADS) & (value < DV)
        x = tl.load(v + v_row + value, mask=mask)
        tl.store(value_pages + head * VALUE_STRIDES[2] + value, x.to(value_pages.dtype.element_ty), mask=mask)


_launch = Launcher(_write_pages_kernel)


def write_pages(k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, indices: StateIndices) -> None:
    heads, D = k.shape[1:]
    DV = v.shape[2]
    block_d, block_dv = power_of_2(D), power_of_2(DV)
    _launch(
        len(k),
        (k, v, key_pages, value_pages),
        index_pointers(indices, ("kv_slot",)),
        (*k.stride()[:2], *v.stride()[:2]),
        {
            "K_ALIGNMENT": stride_alignment(k),
            "V_ALIGNMENT": stride_alignment(v),
            "KEY_STRIDES": key_pages.stride()[:3],
            "VALUE_STRIDES": value_pages.stride()[:3],
            "PAGE": key_pages.shape[1],
            "HEADS": heads,
            "D": D,
            "DV": DV,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "BLOCK_H": min(power_of_2(heads), max(TILE // max(block_d, block_dv), 1)),
        },
        num_warps=4,
    )
