"""Run state-space duality over decode rows and their token logs, in one Triton launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, layer_strides, power_of_2, slot_elements, slot_stride
from ..common.log import (
    ARRIVALS_STRIDE,
    DECODE_ARRAYS,
    LEAST_WIDTH,
    ROWS,
    WINDOW,
    arrive,
    decode_row,
    depth_of,
    entry_scores,
    entry_values,
    for_rows,
    load_state,
    most_tiles,
    next_launch_may_begin,
    prefetch_entries,
    registers,
    row_sums,
    scratch,
    slot_of,
    tile_bits,
    tile_columns,
    tile_rows,
    wait_for_arrivals,
    wait_for_previous_launch,
)
from .prepare import SCALARS, prepare

MAX_HEADS = 16  # per program that prepares


@triton.jit
def _decode(
    x,
    z,
    state,
    out,
    log_x,
    scores,
    vectors,
    scalars,
    arrivals,
    row,
    first_tile,
    tiles,
    waiting,
    source,
    folded,
    X_STRIDES: tl.constexpr,
    Z_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MOST_TILES: tl.constexpr,
    PREPARING: tl.constexpr,
):
    """Compute the outputs of a batch row for `tiles` tiles of BLOCK_P lines of one head's state."""
    TILES: tl.constexpr = P // BLOCK_P
    ASKED: tl.constexpr = MOST_TILES * BLOCK_P
    head, first_value = first_tile // TILES, first_tile % TILES * BLOCK_P
    group = head // (HEADS // GROUPS)
    log_x += head * P
    state += (head * P + first_value) * N
    prefetch_entries(log_x + first_value // ASKED * ASKED, row.start, row.end, HEADS * P, ASKED)
    wait_for_arrivals(arrivals, PREPARING, waiting)
    lane, channel, entry = tile_rows(BLOCK_P), tile_columns(BLOCK_N), tl.arange(0, WINDOW)
    in_N = channel < N
    element = lane[:, :, None, None] * N + channel
    read = tl.broadcast_to(tl.where(source != 0, in_N, False), element.shape)
    for tile in range(tiles):
        value = first_value + tile * BLOCK_P + lane
        S = load_state(state + tile * (BLOCK_P * N) + element, read, folded)
        xs = entry_values(log_x, row, value, HEADS * P)
        for t in range(row.tokens):
            token = row.row.to(tl.int64) * row.tokens + t
            computed = t < row.length
            scalar = scalars + (token * HEADS + head) * SCALARS
            raw = tl.load(x + token * X_STRIDES[0] + head * X_STRIDES[1] + value, mask=value < P)
            own = raw.to(tl.float32)
            met = tl.sum(S * for_rows(vectors + (token * GROUPS + group) * N, channel, in_N), axis=2) * tl.load(scalar)
            met = row_sums(met, xs * entry_scores(scores + (token * HEADS + head) * WINDOW))
            y = met + tl.load(scalar + 1) * own
            if z is not None:
                gate = tl.load(z + token * Z_STRIDES[0] + head * Z_STRIDES[1] + value, mask=value < P).to(tl.float32)
                y *= gate / (1 + tl.exp(-gate))
            y = tl.where(computed, y, 0.0).to(out.dtype.element_ty)
            tl.store(out + token * OUT_STRIDE + head * P + value, y)
            tl.store(log_x + (row.end + t) * (HEADS * P) + value, raw, mask=tl.where(computed, value < P, False))
            if t + 1 < row.length:
                place, following = row.end + depth_of(row.depths, t), row.end + depth_of(row.depths, t + 1)
                xs = tl.where((entry == place)[None, None, :], own[:, :, None], xs)
                xs = tl.where((entry < following)[None, None, :], xs, 0.0)  # entries of siblings may be NaN


@triton.jit(
    do_not_specialize=[
        "slot_stride", "x_stride", "B_stride", "dt_stride", "G_stride", "num_rows", "tokens_per_decode", "tile_bits",
        "dt_min", "dt_max",
    ]
)  # fmt: skip
def _decode_kernel(
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    state,
    out,
    log_x,
    log_B,
    log_dt,
    log_G,
    scores,
    vectors,
    scalars,
    src,
    dst,
    lengths,
    slots,
    starts,
    ends,
    depths,
    arrivals,
    slot_stride,
    x_stride,
    B_stride,
    dt_stride,
    G_stride,
    num_rows,
    tokens_per_decode,
    tile_bits,
    dt_min,
    dt_max,
    X_STRIDES: tl.constexpr,
    DT_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
    Z_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    MOST_TILES: tl.constexpr,
    PREPARING: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """Prepare tokens in the first programs, PREPARING per batch row, and read states in the others."""
    wait_for_previous_launch()
    next_launch_may_begin()
    TILES: tl.constexpr = HEADS * (P // BLOCK_P)
    waiting = TILES >> tile_bits
    program = tl.program_id(0) - num_rows * PREPARING
    first_tile = program << tile_bits
    row = tl.where(program < 0, tl.program_id(0) // PREPARING, first_tile // TILES)
    batch_row = decode_row(row, lengths, slots, starts, ends, depths, tokens_per_decode)
    slot = batch_row.slot
    arrivals += row * ARRIVALS_STRIDE
    if program < 0:
        prepare(
            dt, A, B, C, D, dt_bias,
            slot_of(log_B, slot, B_stride), slot_of(log_dt, slot, dt_stride), slot_of(log_G, slot, G_stride),
            scores, vectors, scalars, row, tl.program_id(0) % PREPARING,
            batch_row.length, batch_row.start, batch_row.end, batch_row.depths, tokens_per_decode, dt_min, dt_max,
            DT_STRIDES, B_STRIDES, C_STRIDES, HEADS, GROUPS, N, BLOCK_N, BLOCK_HEADS, ONE_TOKEN,
        )  # fmt: skip
        arrive(arrivals, PREPARING, waiting)
    else:
        source, folded = tl.load(src + row), tl.load(dst + row) != 0
        _decode(
            x, z, state + source * slot_elements(slot_stride, state), out, slot_of(log_x, slot, x_stride),
            scores, vectors, scalars, arrivals, batch_row, first_tile % TILES, 1 << tile_bits, waiting, source, folded,
            X_STRIDES, Z_STRIDES, OUT_STRIDE, HEADS, GROUPS, P, N, BLOCK_N, BLOCK_P, MOST_TILES, PREPARING,
        )  # fmt: skip


_launch = Launcher(_decode_kernel)


def decode(
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
    dt_limit: tuple[float, float],
    out: Tensor,
) -> None:
    """Fill the decode tokens of `out` [F, H, P] and log them. Scratch: 72 H + 4 G N bytes per token."""
    heads, P = x.shape[1:]
    groups, N = B.shape[1:]
    rows, width = indices.num_decodes, indices.tokens_per_decode
    x_strides, dt_strides, B_strides, C_strides, z_strides = layer_strides(x, dt, B, C, x if z is None else z)
    sizes = WINDOW.value * heads, groups * N, SCALARS.value * heads
    block_N, block_heads = max(power_of_2(N), LEAST_WIDTH), min(power_of_2(heads // groups), MAX_HEADS)
    preparing = groups * cdiv(heads // groups, block_heads)
    bits = tile_bits(P, block_N, rows * heads, x.get_device())
    between = scratch(x, [rows * width * size for size in sizes])
    _launch(
        rows * (preparing + (heads * (P // ROWS) >> bits)),
        (x, dt, A, B, C, D, z, dt_bias, state, out, *log, *between),
        index_pointers(indices, DECODE_ARRAYS),
        (*map(slot_stride, (state, *log)), rows, width, bits, *map(float, dt_limit)),
        {
            "X_STRIDES": x_strides,
            "DT_STRIDES": dt_strides,
            "B_STRIDES": B_strides,
            "C_STRIDES": C_strides,
            "Z_STRIDES": z_strides,
            "OUT_STRIDE": out.stride(0),
            "HEADS": heads,
            "GROUPS": groups,
            "P": P,
            "N": N,
            "BLOCK_N": block_N,
            "BLOCK_P": ROWS,
            "BLOCK_HEADS": block_heads,
            "MOST_TILES": most_tiles(P),
            "PREPARING": preparing,
            "ONE_TOKEN": width == 1,
        },
        num_warps=1,
        maxnreg=registers(block_N),
        launch_pdl=True,
    )
