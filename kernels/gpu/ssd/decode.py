"""Run decode over token logs in one Triton launch."""

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
from ..common.structs import aggregate
from .decode_prepare import SCALARS, Inputs, Log, Prepared, Sizes, prepare

MAX_HEADS = 16  # per program that prepares


@aggregate
class Values:
    """Hold x, gates and outputs [F, H, P], with strides."""

    x: tl.tensor
    z: tl.tensor | None
    out: tl.tensor
    X_STRIDES: tuple[int, ...]
    Z_STRIDES: tuple[int, ...]
    OUT_STRIDE: int


@aggregate
class State:
    """Hold a row's state [H, P, N], its slot, and whether the fold reads it again."""

    place: tl.tensor
    slot: tl.tensor
    folded: tl.tensor


@triton.jit
def _decode(values, state, log_x, prepared, arrivals, waiting, row, first_tile, tile_bits, sizes):
    """Compute a row's outputs in tiles of BLOCK_P lines of one head's state."""
    P: tl.constexpr = sizes.P
    N: tl.constexpr = sizes.N
    HEADS: tl.constexpr = sizes.HEADS
    BLOCK_P: tl.constexpr = sizes.BLOCK_P
    TILES: tl.constexpr = P // BLOCK_P
    ASKED: tl.constexpr = sizes.MOST_TILES * BLOCK_P
    head, first_value = first_tile // TILES, first_tile % TILES * BLOCK_P
    group = head // (HEADS // sizes.GROUPS)
    log_x += head * P
    place = state.place + (head * P + first_value) * N
    prefetch_entries(log_x + first_value // ASKED * ASKED, row.start, row.end, HEADS * P, ASKED)
    wait_for_arrivals(arrivals, sizes.PREPARING, waiting)
    lane, channel, entry = tile_rows(BLOCK_P), tile_columns(sizes.BLOCK_N), tl.arange(0, WINDOW)
    in_N = channel < N
    element = lane[:, :, None, None] * N + channel
    read = tl.broadcast_to(tl.where(state.slot != 0, in_N, False), element.shape)
    for tile in range(1 << tile_bits):
        value = first_value + tile * BLOCK_P + lane
        S = load_state(place + tile * (BLOCK_P * N) + element, read, state.folded)
        xs = entry_values(log_x, row, value, HEADS * P)
        for t in range(row.tokens):
            token = row.row.to(tl.int64) * row.tokens + t
            computed = t < row.length
            scalar = prepared.scalars + (token * HEADS + head) * SCALARS
            x = values.x + token * values.X_STRIDES[0] + head * values.X_STRIDES[1] + value
            raw = tl.load(x, mask=value < P)
            own = raw.to(tl.float32)
            vector = prepared.vectors + (token * sizes.GROUPS + group) * N
            met = tl.sum(S * for_rows(vector, channel, in_N), axis=2) * tl.load(scalar)
            met = row_sums(met, xs * entry_scores(prepared.scores + (token * HEADS + head) * WINDOW))
            y = met + tl.load(scalar + 1) * own
            if values.z is not None:
                gate = values.z + token * values.Z_STRIDES[0] + head * values.Z_STRIDES[1] + value
                gate = tl.load(gate, mask=value < P).to(tl.float32)
                y *= gate / (1 + tl.exp(-gate))
            y = tl.where(computed, y, 0.0).to(values.out.dtype.element_ty)
            tl.store(values.out + token * values.OUT_STRIDE + head * P + value, y)
            tl.store(log_x + (row.end + t) * (HEADS * P) + value, raw, mask=tl.where(computed, value < P, False))
            if t + 1 < row.length:
                place_of_x = row.end + depth_of(row.depths, t)
                following = row.end + depth_of(row.depths, t + 1)
                xs = tl.where((entry == place_of_x)[None, None, :], own[:, :, None], xs)
                xs = tl.where((entry < following)[None, None, :], xs, 0.0)  # siblings may be NaN


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
    """Prepare tokens in the first programs, PREPARING per row; read states in the others."""
    wait_for_previous_launch()
    next_launch_may_begin()
    TILES: tl.constexpr = HEADS * (P // BLOCK_P)
    waiting = TILES >> tile_bits
    program = tl.program_id(0) - num_rows * PREPARING
    first_tile = program << tile_bits
    index = tl.where(program < 0, tl.program_id(0) // PREPARING, first_tile // TILES)
    row = decode_row(index, lengths, slots, starts, ends, depths, tokens_per_decode)
    sizes = Sizes(HEADS, GROUPS, P, N, BLOCK_N, BLOCK_P, BLOCK_HEADS, MOST_TILES, PREPARING)
    prepared = Prepared(scores, vectors, scalars)
    arrivals += index * ARRIVALS_STRIDE
    if program < 0:
        inputs = Inputs(dt, A, B, C, D, dt_bias, dt_min, dt_max, DT_STRIDES, B_STRIDES, C_STRIDES)
        log = Log(
            slot_of(log_B, row.slot, B_stride), slot_of(log_dt, row.slot, dt_stride), slot_of(log_G, row.slot, G_stride)
        )
        prepare(inputs, log, prepared, row, tl.program_id(0) % PREPARING, sizes, ONE_TOKEN)
        arrive(arrivals, PREPARING, waiting)
    else:
        source, folded = tl.load(src + index), tl.load(dst + index) != 0
        held = State(state + source * slot_elements(slot_stride, state), source, folded)
        values = Values(x, z, out, X_STRIDES, Z_STRIDES, OUT_STRIDE)
        xs = slot_of(log_x, row.slot, x_stride)
        _decode(values, held, xs, prepared, arrivals, waiting, row, first_tile % TILES, tile_bits, sizes)


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
    """Fill the decode tokens of `out` [F, H, P] and log them. Prepared: 72 H + 4 G N bytes per token."""
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
