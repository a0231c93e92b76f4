"""State-space duality (Mamba2): decode over a token log, and its fold."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from log_window import (
    FOLD_PROGRAMS,
    FOLD_ROWS,
    PROGRAM_TILES,
    ROWS,
    WINDOW,
    fold_update,
    for_rows,
    next_launch_may_begin,
    row_window,
    slot_of,
    slot_units,
    task_of_fold,
    tile_columns,
    tile_rows,
    tiles_of_program,
    wait_for_previous_launch,
    window_scores,
    window_values,
)
from torch import Tensor

from mambacache.kernels.gpu.common import state_tile
from mambacache.kernels.gpu.common.chunks import row_and_tile
from mambacache.kernels.gpu.common.decays import LOG2_E, softplus
from mambacache.kernels.gpu.common.layout import layer_strides, power_of_2, slot_elements, slot_stride

SCALARS = tl.constexpr(2)  # of one token and head: the decay of the state, and what its x is multiplied with


def log_entry(x: Tensor, B: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What the log holds of one token: its input and B as they came, its step size, and the sum of log2 decays up to
    it. x [F, H, P], B [F, G, N]."""
    heads, fp32 = x.shape[1:2], torch.float32
    return {"x": (x.shape[1:], x.dtype), "B": (B.shape[1:], B.dtype), "dt": (heads, fp32), "G": (heads, fp32)}


def scratch_of(x: Tensor, B: Tensor) -> tuple[Tensor, ...]:
    """Memory between the two launches: scores, vectors and scalars of every token."""
    sizes = x.shape[1] * WINDOW.value, B.shape[1:].numel(), x.shape[1] * SCALARS.value
    return tuple(torch.full((len(x) * size,), torch.nan, device=x.device) for size in sizes)


@triton.jit(do_not_specialize=["log_stride", "tokens_per_decode"])
def _prepare_kernel(
    dt,
    A,
    B,
    C,
    D,
    dt_bias,
    log_B,
    log_dt,
    log_G,
    scores,
    vectors,
    scalars,
    lengths,
    slots,
    firsts,
    ats,
    log_stride,
    tokens_per_decode,
    DT_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """A program takes one group of heads of one row. It logs the new tokens' Bs and steps, and leaves each token's C,
    in fp32, in `vectors` [F, G, N], and what it meets in the window in `scores` [F, H, 16]."""
    SHARING: tl.constexpr = HEADS // GROUPS
    row, group = row_and_tile(GROUPS)
    channel, entry = tl.arange(0, BLOCK_N), tl.arange(0, WINDOW)
    head, in_group = group * SHARING + tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HEADS) < SHARING
    in_N = channel < N
    length = tl.load(lengths + row)
    slot, first, at = row_window(slots, firsts, ats, row)
    log_B = slot_of(log_B, slot, log_stride) + group * N
    log_dt, log_G = slot_of(log_dt, slot, log_stride) + head, slot_of(log_G, slot, log_stride) + head
    rate = tl.load(A + head, mask=in_group, other=0).to(tl.float32) * LOG2_E
    bias = tl.load(dt_bias + head, mask=in_group, other=0).to(tl.float32)
    skip = tl.load(D + head, mask=in_group, other=0).to(tl.float32)

    next_launch_may_begin()
    inside = (entry >= first) & (entry < at)
    Bs = log_B + (entry * (GROUPS * N))[:, None] + channel[None, :]
    Bs = tl.load(Bs, mask=inside[:, None] & in_N[None, :], other=0)
    held, place = inside[:, None] & in_group[None, :], (entry * HEADS)[:, None]
    sizes, Gs = (
        tl.load(log_dt[None, :] + place, mask=held, other=0),
        tl.load(log_G[None, :] + place, mask=held, other=0),
    )
    G = tl.load(log_G + (at - 1) * HEADS, mask=tl.where(at > first, in_group, False), other=0)
    for t in range(tokens_per_decode):
        token = row.to(tl.int64) * tokens_per_decode + t
        here = at + t
        known, mine = tl.where(t < length, in_N, False), tl.where(t < length, in_group, False)
        raw = tl.load(B + token * B_STRIDES[0] + group * B_STRIDES[1] + channel, mask=known, other=0)
        reads = tl.load(C + token * C_STRIDES[0] + group * C_STRIDES[1] + channel, mask=known, other=0).to(tl.float32)
        size = tl.load(dt + token * DT_STRIDES[0] + head * DT_STRIDES[1], mask=mine, other=0).to(tl.float32)
        size = softplus(size + bias)
        G += size * rate
        tl.store(log_B + here * (GROUPS * N) + channel, raw, mask=known)
        tl.store(log_dt + here * HEADS, size, mask=mine)
        tl.store(log_G + here * HEADS, G, mask=mine)

        score = scores + ((token * HEADS + head) * WINDOW)[None, :] + entry[:, None]
        met = tl.sum(Bs.to(tl.float32) * reads[None, :], axis=1)[:, None] * tl.exp2(G[None, :] - Gs) * sizes
        tl.store(score, met, mask=(entry >= 0)[:, None] & in_group[None, :])
        tl.store(vectors + (token * GROUPS + group) * N + channel, reads, mask=in_N)
        scalar = scalars + (token * HEADS + head) * SCALARS
        tl.store(scalar, tl.exp2(G), mask=in_group)
        tl.store(scalar + 1, tl.sum(raw.to(tl.float32) * reads, axis=0) * size + skip, mask=in_group)
        new = (entry == here)[:, None]
        Bs = tl.where(new, raw[None, :], Bs)
        sizes, Gs = tl.where(new, size[None, :], sizes), tl.where(new, G[None, :], Gs)


@triton.jit(do_not_specialize=["slot_stride", "log_stride", "tokens_per_decode", "tiles"])
def _decode_kernel(
    x,
    state,
    out,
    log_x,
    scores,
    vectors,
    scalars,
    src,
    lengths,
    slots,
    firsts,
    ats,
    slot_stride,
    log_stride,
    tokens_per_decode,
    tiles,
    X_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """A program takes some tiles of BLOCK_P rows of one head's state past the tokens of one row."""
    row, head, first_value = tiles_of_program(tiles, HEADS, P, BLOCK_P)
    group = head // (HEADS // GROUPS)
    source, length = tl.load(src + row), tl.load(lengths + row)
    slot, first, at = row_window(slots, firsts, ats, row)
    lane, channel, entry = tile_rows(BLOCK_P), tile_columns(BLOCK_N), tl.arange(0, WINDOW)
    in_N = channel < N
    element = lane[:, :, None, None] * N + channel
    state += source * slot_elements(slot_stride, state) + (head * P + first_value) * N
    read = tl.broadcast_to(tl.where(source != 0, in_N, False), element.shape)
    log_x = slot_of(log_x, slot, log_stride) + head * P
    for tile in range(tiles):
        value = first_value + tile * BLOCK_P + lane
        S = tl.load(state + tile * (BLOCK_P * N) + element, mask=read, other=0).to(tl.float32)
        xs = window_values(log_x, first, at, value, HEADS * P)
        wait_for_previous_launch()
        for t in range(tokens_per_decode):
            token = row.to(tl.int64) * tokens_per_decode + t
            computed = t < length
            scalar = scalars + (token * HEADS + head) * SCALARS
            raw = tl.load(x + token * X_STRIDES[0] + head * X_STRIDES[1] + value, mask=value < P)
            own = raw.to(tl.float32)
            met = tl.sum(S * for_rows(vectors + (token * GROUPS + group) * N, channel, in_N), axis=2) * tl.load(scalar)
            met = tl.sum(met + xs * window_scores(scores + (token * HEADS + head) * WINDOW), axis=2)
            y = tl.where(computed, met + tl.load(scalar + 1) * own, 0.0).to(out.dtype.element_ty)
            tl.store(out + token * OUT_STRIDE + head * P + value, y)
            tl.store(log_x + (at + t) * (HEADS * P) + value, raw, mask=tl.where(computed, value < P, False))
            xs = tl.where((entry == at + t)[None, None, :], own[:, :, None], xs)


@triton.jit(do_not_specialize=["slot_stride", "log_stride"])
def _fold_kernel(
    state,
    log_x,
    log_B,
    log_dt,
    log_G,
    folds,
    slot_stride,
    log_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """A program takes, one after the other, tiles of BLOCK_P rows of one head's state of rows that are folded."""
    TILES: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    entry, channel, lane = tl.arange(0, WINDOW), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    stride = slot_elements(slot_stride, state)
    for task in range(tl.program_id(0), tl.load(folds) * (HEADS * TILES), tl.num_programs(0)):
        head, tile, source, target, slot, first = task_of_fold(folds, task, HEADS, TILES)
        group, value = head // (HEADS // GROUPS), tile * BLOCK_P + lane
        element, there = state_tile.tile_elements(tile * BLOCK_P, P, N, BLOCK_P, BLOCK_N)
        place = state + head * P * N + element
        S = state_tile.load_tile(place + source * stride, tl.where(source != 0, there, False), BLOCK_P, BLOCK_N)

        inside = entry >= first
        Bs = slot_of(log_B, slot, log_stride) + (entry * (GROUPS * N) + group * N)[:, None] + channel[None, :]
        Bs = tl.load(Bs, mask=inside[:, None] & (channel < N)[None, :], other=0)
        xs = slot_of(log_x, slot, log_stride) + (entry * (HEADS * P) + head * P)[None, :] + value[:, None]
        xs = tl.load(xs, mask=inside[None, :] & (value < P)[:, None], other=0).to(tl.float32)
        G = slot_of(log_G, slot, log_stride) + head
        last = tl.load(G + (WINDOW - 1) * HEADS)
        scale = tl.exp2(last - tl.load(G + entry * HEADS, mask=inside, other=0))
        scale *= tl.load(slot_of(log_dt, slot, log_stride) + entry * HEADS + head, mask=inside, other=0)
        S = fold_update(xs * scale[None, :], Bs, S * tl.exp2(last))
        state_tile.store_tile(place + target * stride, S, there)


def _shape(x: Tensor, B: Tensor) -> dict[str, int]:
    return {"HEADS": x.shape[1], "GROUPS": B.shape[1], "N": B.shape[2], "BLOCK_N": max(16, power_of_2(B.shape[2]))}


def decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    log: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    out: Tensor,
    scratch: tuple[Tensor, ...],
    tiles: int = PROGRAM_TILES,
) -> None:
    """Fills `out` [F, H, P] and logs the tokens."""
    strides = layer_strides(x, dt, B, C)
    count, stride = len(rows["src"]), slot_units(log["x"])
    tokens = len(x) // count
    places = [rows[name] for name in ("length", "slot", "first", "at")]
    shape = _shape(x, B)
    heads, groups, P = shape["HEADS"], shape["GROUPS"], x.shape[2]
    _prepare_kernel[(count * groups,)](
        dt, A, B, C, D, dt_bias, log["B"], log["dt"], log["G"], *scratch, *places, stride, tokens,
        DT_STRIDES=strides[1], B_STRIDES=strides[2], C_STRIDES=strides[3], BLOCK_HEADS=power_of_2(heads // groups),
        num_warps=1, **shape,
    )  # fmt: skip
    tiles = min(tiles, P // ROWS)
    _decode_kernel[(count * heads * (P // ROWS // tiles),)](
        x, state, out, log["x"], *scratch, rows["src"], *places, slot_stride(state), stride, tokens, tiles,
        X_STRIDES=strides[0], OUT_STRIDE=out.stride(0), P=P, BLOCK_P=ROWS, num_warps=1, launch_pdl=True, **shape,
    )  # fmt: skip


def fold(x: Tensor, B: Tensor, state: Tensor, log: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
    """Stores the states behind the windows that a step has filled; x and B give their shapes alone."""
    shape = _shape(x, B)
    tiles = -(-x.shape[2] // FOLD_ROWS) * shape["HEADS"] * len(rows["src"])
    _fold_kernel[(min(tiles, FOLD_PROGRAMS),)](
        state, log["x"], log["B"], log["dt"], log["G"], rows["folds"], slot_stride(state), slot_units(log["x"]),
        P=x.shape[2], BLOCK_P=FOLD_ROWS, num_warps=4, **shape,
    )  # fmt: skip
