"""Fold the token logs of Kimi Delta Attention into states, in one Triton launch.

Entries are added one by one: a product would need their scaled keys in more than 16 bits, in every tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...device import overlaps_launches
from ...indices import StateIndices
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, power_of_2, slot_elements, slot_stride
from ..common.log import (
    FOLD_ARRAYS,
    FOLD_SHARE,
    LEAST_WIDTH,
    ROWS,
    next_launch_may_begin,
    prefetch_entries,
    slot_of,
    task_of_fold,
    wait_for_previous_launch,
)

PROGRAMS = 4224


@triton.jit(do_not_specialize=["slot_stride", "k_stride", "norm_stride", "u_stride", "G_stride", "tokens_per_decode"])
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
    tokens_per_decode,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """Fold token logs into tiles of BLOCK_V lines of one head's state.

    In a step of one token, only the last entry must wait for decode.
    """
    next_launch_may_begin(PDL)
    TILES: tl.constexpr = V // BLOCK_V
    ASKED: tl.constexpr = K if K == BLOCK_K else BLOCK_K // 2  # a power of 2 within the log
    channel, lane = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_K = channel < K
    stride = slot_elements(slot_stride, state)
    for task in range(tl.program_id(0), tl.load(folds) * (HEADS * TILES), tl.num_programs(0)):
        fold = task_of_fold(folds, task, HEADS, TILES)
        head, slot, start, last = fold.head, fold.slot, fold.start, fold.last
        first_row = head * V + fold.tile * BLOCK_V
        prefetch_entries(slot_of(log_k, slot, k_stride) + head * K, start, last, HEADS * K, ASKED)
        prefetch_entries(slot_of(log_G, slot, G_stride) + head * K, start, last, HEADS * K, ASKED)
        prefetch_entries(slot_of(log_u, slot, u_stride) + first_row, start, last, HEADS * V, BLOCK_V)
        place = state + first_row * K + (lane * K)[:, None] + channel[None, :]
        there = tl.broadcast_to(in_K[None, :], [BLOCK_V, BLOCK_K])
        S = tl.load(place + fold.source * stride, mask=tl.where(fold.source != 0, there, False), other=0).to(tl.float32)
        if tokens_per_decode > 1:
            wait_for_previous_launch(PDL)
        keys = slot_of(log_k, slot, k_stride) + head * K + channel
        norms = slot_of(log_norm, slot, norm_stride) + head
        us = slot_of(log_u, slot, u_stride) + first_row + lane
        Gs = slot_of(log_G, slot, G_stride) + head * K + channel
        before = tl.load(Gs + (last - 1) * (HEADS * K), mask=tl.where(last > start, in_K, False), other=0)
        S *= tl.exp2(before)[None, :]
        for entry in tl.range(start, last, loop_unroll_factor=2):
            decay = tl.exp2(before - tl.load(Gs + entry * (HEADS * K), mask=in_K, other=0))
            key = tl.load(keys + entry * (HEADS * K), mask=in_K, other=0).to(tl.float32)
            key *= decay * tl.load(norms + entry * HEADS)
            S += tl.load(us + entry * (HEADS * V))[:, None] * key[None, :]
        wait_for_previous_launch(PDL)
        key = tl.load(keys + last * (HEADS * K), mask=in_K, other=0).to(tl.float32) * tl.load(norms + last * HEADS)
        S *= tl.exp2(tl.load(Gs + last * (HEADS * K), mask=in_K, other=0) - before)[None, :]
        S += tl.load(us + last * (HEADS * V))[:, None] * key[None, :]
        tl.store(place + fold.target * stride, S.to(state.dtype.element_ty), mask=there)
    wait_for_previous_launch(PDL)


_launch = Launcher(_fold_kernel)


def fold(k: Tensor, v: Tensor, state: Tensor, log: Sequence[Tensor], indices: StateIndices) -> None:
    """Store folded states at `decode_dst`; k and v give their shapes alone."""
    heads, K = k.shape[1:]
    V = v.shape[2]
    block_K, pdl = max(power_of_2(K), LEAST_WIDTH), overlaps_launches(k.get_device())
    _launch(
        min(V // ROWS * heads * cdiv(indices.num_decodes, FOLD_SHARE), PROGRAMS),
        (state, *log),
        index_pointers(indices, FOLD_ARRAYS),
        (slot_stride(state), *map(slot_stride, log), indices.tokens_per_decode),
        {
            "HEADS": heads,
            "K": K,
            "V": V,
            "BLOCK_K": block_K,
            "BLOCK_V": ROWS,
            "PDL": pdl,
        },
        num_warps=1 if block_K <= 128 else 4,
        num_stages=1,  # more would read a log before the wait
        launch_pdl=pdl,
    )
