"""Fold the token logs of state-space duality into states, in one Triton launch."""

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


@triton.jit(do_not_specialize=["slot_stride", "x_stride", "B_stride", "dt_stride", "G_stride"])
def _fold_kernel(
    state,
    log_x,
    log_B,
    log_dt,
    log_G,
    folds,
    slot_stride,
    x_stride,
    B_stride,
    dt_stride,
    G_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Fold token logs into tiles of BLOCK_P lines of one head's state, several tiles per program."""
    next_launch_may_begin()
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    entry, channel, lane = tl.arange(0, WINDOW), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    stride = slot_elements(slot_stride, state)
    for task in range(tl.program_id(0), tl.load(folds) * (HEADS * TILES), tl.num_programs(0)):
        fold = task_of_fold(folds, task, HEADS, TILES)
        head, slot, start, last = fold.head, fold.slot, fold.start, fold.last
        group, value = head // (HEADS // GROUPS), fold.tile * BLOCK_P + lane
        element, there = fold_elements(fold.tile * BLOCK_P, P, N, BLOCK_P, BLOCK_N)
        place = state + head * P * N + element
        S = tl.load(place + fold.source * stride, mask=tl.where(fold.source != 0, there, False), other=0)
        S = fold_tile(S, BLOCK_P, BLOCK_N)

        wait_for_previous_launch()
        inside = (entry >= start) & (entry <= last)
        Bs = slot_of(log_B, slot, B_stride) + (entry * (GROUPS * N) + group * N)[:, None] + channel[None, :]
        Bs = tl.load(Bs, mask=inside[:, None] & (channel < N)[None, :], other=0)
        xs = slot_of(log_x, slot, x_stride) + (entry * (HEADS * P) + head * P)[None, :] + value[:, None]
        xs = tl.load(xs, mask=inside[None, :] & (value < P)[:, None], other=0).to(tl.float32)
        G = slot_of(log_G, slot, G_stride) + head
        total = tl.load(G + last * HEADS)
        scale = tl.exp2(total - tl.load(G + entry * HEADS, mask=inside, other=0))
        scale *= tl.load(slot_of(log_dt, slot, dt_stride) + entry * HEADS + head, mask=inside, other=0)
        S = tile_elements(fold_update(xs * scale[None, :], fold_columns(Bs), S * tl.exp2(total)))
        tl.store(place + fold.target * stride, S.to(state.dtype.element_ty), mask=there)
    wait_for_previous_launch()


_launch = Launcher(_fold_kernel)


def fold(x: Tensor, B: Tensor, state: Tensor, log: Sequence[Tensor], indices: StateIndices) -> None:
    """Store folded states at `decode_dst`; only the shapes of x and B matter."""
    heads, P = x.shape[1:]
    groups, N = B.shape[1:]
    rows, warps = fold_shape(N)
    _launch(
        min(cdiv(P, rows) * heads * cdiv(indices.num_decodes, FOLD_SHARE), FOLD_PROGRAMS),
        (state, *log),
        index_pointers(indices, FOLD_ARRAYS),
        (slot_stride(state), *map(slot_stride, log)),
        {
            "HEADS": heads,
            "GROUPS": groups,
            "P": P,
            "N": N,
            "BLOCK_N": max(power_of_2(N), LEAST_WIDTH),
            "BLOCK_P": rows,
        },
        num_warps=warps,
        num_stages=1,  # more would read a log before the wait
        launch_pdl=True,
    )
