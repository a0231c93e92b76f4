"""Fold token logs into states, for the gated delta rule and state-space duality.

With G_i the sum of log2 decays up to entry i, n entries turn a head's state S [V, K] into

    exp2(G_n) S + sum_i (exp2(G_n - G_i) factor_i values_i) keys_i^T

Columns of tiles are permuted: a thread's two pairs are neighbours in the state, 16 bytes per access.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...device import overlaps_launches
from ...indices import StateIndices
from .delta_rule import dot
from .launch import Launcher, index_pointers
from .layout import cdiv, power_of_2, slot_elements, slot_stride
from .log import (
    FOLD_ARRAYS,
    FOLD_SHARE,
    LEAST_WIDTH,
    WINDOW,
    next_launch_may_begin,
    slot_of,
    task_of_fold,
    wait_for_previous_launch,
)

PROGRAMS = 1056


@triton.jit
def _elements(
    first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    warp = tl.arange(0, BLOCK_ROWS // 16)[None, None, :, None, None, None]
    half = tl.arange(0, 2)[None, None, None, :, None, None]
    row = first_row + warp * 16 + half * 8 + tl.arange(0, 8)[None, :, None, None, None, None]
    part = tl.arange(0, BLOCK_COLUMNS // 16)[None, None, None, None, :, None]
    quad = tl.arange(0, 4)[:, None, None, None, None, None]
    element = row * COLUMNS + part * 16 + quad * 4 + tl.arange(0, 4)[None, None, None, None, None, :]
    return element, (row < ROWS) & (part * 16 < COLUMNS)


@triton.jit
def _to_tile(elements):
    BLOCKS: tl.constexpr = elements.shape[2]
    PARTS: tl.constexpr = elements.shape[4]
    tile = tl.reshape(elements.to(tl.float32), [4, 8, BLOCKS, 2, PARTS, 2, 2])
    return tl.reshape(tl.permute(tile, (2, 3, 1, 4, 5, 0, 6)), [BLOCKS * 16, PARTS * 16])


@triton.jit
def _from_tile(tile):
    BLOCKS: tl.constexpr = tile.shape[0] // 16
    PARTS: tl.constexpr = tile.shape[1] // 16
    tile = tl.reshape(tile, [BLOCKS, 2, 8, PARTS, 2, 4, 2])
    return tl.reshape(tl.permute(tile, (5, 2, 0, 1, 3, 4, 6)), [4, 8, BLOCKS, 2, PARTS, 4])


@triton.jit
def _permuted_columns(keys):
    ROWS: tl.constexpr = keys.shape[0]
    COLUMNS: tl.constexpr = keys.shape[1]
    keys = tl.permute(tl.reshape(keys, [ROWS, COLUMNS // 16, 4, 2, 2]), (0, 1, 3, 2, 4))
    return tl.reshape(keys, [ROWS, COLUMNS])


@triton.jit
def _add_product(values, keys, S):
    """Return S + values keys; bf16 keys meet three parts of the values."""
    if keys.dtype == tl.bfloat16:
        high = values.to(tl.bfloat16)
        rest = values - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return S + tl.dot(high, keys, tl.dot(middle, keys, tl.dot(low, keys)))
    else:
        return dot(values, keys.to(tl.float32), S)


@triton.jit(do_not_specialize=["state_stride", "keys_stride", "factors_stride", "values_stride", "sums_stride"])
def _fold_kernel(
    state,
    log_keys,
    log_factors,
    log_values,
    log_sums,
    folds,
    state_stride,
    keys_stride,
    factors_stride,
    values_stride,
    sums_stride,
    GROUPS: tl.constexpr,
    FACTORS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    next_launch_may_begin(PDL)
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    entry, channel, lane = tl.arange(0, WINDOW), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_K = channel < K
    stride = slot_elements(state_stride, state)
    for task in range(tl.program_id(0), tl.load(folds) * (HEADS * TILES), tl.num_programs(0)):
        fold = task_of_fold(folds, task, HEADS, TILES)
        head, slot, last = fold.head, fold.slot, fold.last
        group, value = head // (HEADS // GROUPS), fold.tile * BLOCK_V + lane
        element, there = _elements(fold.tile * BLOCK_V, V, K, BLOCK_V, BLOCK_K)
        place = state + head * V * K + element
        S = tl.load(place + fold.source * stride, mask=tl.where(fold.source != 0, there, False), other=0)
        S = _to_tile(S)

        wait_for_previous_launch(PDL)
        inside = (entry >= fold.start) & (entry <= last)
        keys = slot_of(log_keys, slot, keys_stride) + (entry * (GROUPS * K) + group * K)[:, None] + channel[None, :]
        keys = tl.load(keys, mask=inside[:, None] & in_K[None, :], other=0)
        values = slot_of(log_values, slot, values_stride) + (entry * (HEADS * V) + head * V)[None, :] + value[:, None]
        values = tl.load(values, mask=inside[None, :] & (value < V)[:, None], other=0).to(tl.float32)
        factors = slot_of(log_factors, slot, factors_stride) + entry * FACTORS + head // (HEADS // FACTORS)
        factors = tl.load(factors, mask=inside, other=0)
        sums = slot_of(log_sums, slot, sums_stride) + head
        total = tl.load(sums + last * HEADS)
        scale = factors * tl.exp2(total - tl.load(sums + entry * HEADS, mask=inside, other=0))
        S = _from_tile(_add_product(values * scale[None, :], _permuted_columns(keys), S * tl.exp2(total)))
        tl.store(place + fold.target * stride, S.to(state.dtype.element_ty), mask=there)
    wait_for_previous_launch(PDL)


_launch = Launcher(_fold_kernel)


def fold(state: Tensor, keys: Tensor, factors: Tensor, values: Tensor, sums: Tensor, indices: StateIndices) -> None:
    """Store states [B, H, V, K] with their logs folded in at `decode_dst`.

    Logs are `keys` [S, 16, G, K], `factors` [S, 16, G or H], `values` [S, 16, H, V] and `sums` of log2 decays [S, 16,
    H].
    """
    heads, V, K = state.shape[1:]
    rows, warps = (64, 4) if K <= 128 else (32, 8)
    tensors = state, keys, factors, values, sums
    pdl = overlaps_launches(state.get_device())
    _launch(
        min(cdiv(V, rows) * heads * cdiv(indices.num_decodes, FOLD_SHARE), PROGRAMS),
        tensors,
        index_pointers(indices, FOLD_ARRAYS),
        tuple(map(slot_stride, tensors)),
        {
            "GROUPS": keys.shape[2],
            "FACTORS": factors.shape[2],
            "HEADS": heads,
            "K": K,
            "V": V,
            "BLOCK_K": max(power_of_2(K), LEAST_WIDTH),
            "BLOCK_V": rows,
            "PDL": pdl,
        },
        num_warps=warps,
        num_stages=1,  # more would read a log before the wait
        launch_pdl=pdl,
    )
