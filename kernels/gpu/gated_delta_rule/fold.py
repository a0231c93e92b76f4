"""Fold the token logs of the gated delta rule into states, in one Triton launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.fold_tile import fold_columns, fold_elements, fold_tile, tile_elements
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, power_of_2, slot_elements, slot_stride
from ..common.log import (
    FOLD_ARRAYS,
    FOLD_PROGRAMS,
    FOLD_SHARE,
    LEAST_WIDTH,
    WINDOW,
    fold_shape,
    fold_update,
    next_launch_may_begin,
    slot_of,
    task_of_fold,
    wait_for_previous_launch,
)


@triton.jit(do_not_specialize=["slot_stride", "k_stride", "norm_stride", "u_stride", "G_stride"])
def _fold_kernel(
    state,
    log_k,
    log_norm,
    log_u,
    log_G,
    folds,
    slot_stride,
    k_stride,
    norm_stride,
    u_stride,
    G_stride,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Fold token logs into tiles of BLOCK_V lines of one value head's state, several tiles per program."""
    next_launch_may_begin()
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    entry, channel, lane = tl.arange(0, WINDOW), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_K = channel < K
    stride = slot_elements(slot_stride, state)
    for task in range(tl.program_id(0), tl.load(folds) * (VALUE_HEADS * TILES), tl.num_programs(0)):
        fold = task_of_fold(folds, task, VALUE_HEADS, TILES)
        head, slot, start, last = fold.head, fold.slot, fold.start, fold.last
        key_head, value = head // (VALUE_HEADS // HEADS), fold.tile * BLOCK_V + lane
        element, there = fold_elements(fold.tile * BLOCK_V, V, K, BLOCK_V, BLOCK_K)
        place = state + head * V * K + element
        S = tl.load(place + fold.source * stride, mask=tl.where(fold.source != 0, there, False), other=0)
        S = fold_tile(S, BLOCK_V, BLOCK_K)

        wait_for_previous_launch()
        inside = (entry >= start) & (entry <= last)
        keys = slot_of(log_k, slot, k_stride) + (entry * (HEADS * K) + key_head * K)[:, None] + channel[None, :]
        keys = tl.load(keys, mask=inside[:, None] & in_K[None, :], other=0)
        us = slot_of(log_u, slot, u_stride) + (entry * (VALUE_HEADS * V) + head * V)[None, :] + value[:, None]
        us = tl.load(us, mask=inside[None, :] & (value < V)[:, None], other=0)
        norms = tl.load(slot_of(log_norm, slot, norm_stride) + entry * HEADS + key_head, mask=inside, other=0)
        G = slot_of(log_G, slot, G_stride) + head
        total = tl.load(G + last * VALUE_HEADS)
        scale = norms * tl.exp2(total - tl.load(G + entry * VALUE_HEADS, mask=inside, other=0))
        S = tile_elements(fold_update(us * scale[None, :], fold_columns(keys), S * tl.exp2(total)))
        tl.store(place + fold.target * stride, S.to(state.dtype.element_ty), mask=there)
    wait_for_previous_launch()


_launch = Launcher(_fold_kernel)


def fold(k: Tensor, v: Tensor, state: Tensor, log: Sequence[Tensor], indices: StateIndices) -> None:
    """Store folded states at `decode_dst`; only the shapes of k and v matter."""
    heads, K = k.shape[1:]
    value_heads, V = v.shape[1:]
    rows, warps = fold_shape(K)
    _launch(
        min(cdiv(V, rows) * value_heads * cdiv(indices.num_decodes, FOLD_SHARE), FOLD_PROGRAMS),
        (state, *log),
        index_pointers(indices, FOLD_ARRAYS),
        (slot_stride(state), *map(slot_stride, log)),
        {
            "HEADS": heads,
            "VALUE_HEADS": value_heads,
            "K": K,
            "V": V,
            "BLOCK_K": max(power_of_2(K), LEAST_WIDTH),
            "BLOCK_V": rows,
        },
        num_warps=warps,
        num_stages=1,  # more would read a log before the wait
        launch_pdl=True,
    )
