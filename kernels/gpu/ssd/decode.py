"""Run decode over token logs in one Triton launch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...device import overlaps_launches
from ...indices import StateIndices
from ..common.decode import States, Tiles, decode_program, read_states
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
    entry_scores,
    for_rows,
    most_tiles,
    next_launch_may_begin,
    registers,
    row_sums,
    scratch,
    slot_of,
    tile_bits,
    wait_for_previous_launch,
)
from ..common.structs import aggregate
from .decode_prepare import SCALARS, Inputs, Log, Scratch, Shape, prepare

MAX_HEADS = 16  # per program that prepares


@aggregate
class Reads:
    """Hold x and gates [F, H, P], with strides, a row's `Scratch`, and constants."""

    x: tl.tensor
    z: tl.tensor | None
    scratch: tl.tensor
    X_STRIDES: tuple[int, ...]
    Z_STRIDES: tuple[int, ...]
    shape: tl.tensor


@triton.jit
def _read(reads, token, tile):
    """Return a token's y, and x in fp32 and raw."""
    shape = reads.shape
    in_P = tile.value < shape.P
    group = tile.head // (shape.HEADS // shape.GROUPS)
    scalar = reads.scratch.scalars + (token * shape.HEADS + tile.head) * SCALARS
    x = reads.x + token * reads.X_STRIDES[0] + tile.head * reads.X_STRIDES[1] + tile.value
    raw = tl.load(x, mask=in_P)
    own = raw.to(tl.float32)
    vector = reads.scratch.vectors + (token * shape.GROUPS + group) * shape.N
    met = tl.sum(tile.S * for_rows(vector, tile.channel, tile.in_K), axis=2) * tl.load(scalar)
    score = reads.scratch.scores + (token * shape.HEADS + tile.head) * WINDOW
    y = row_sums(met, tile.entries * entry_scores(score)) + tl.load(scalar + 1) * own
    if reads.z is not None:
        gate = reads.z + token * reads.Z_STRIDES[0] + tile.head * reads.Z_STRIDES[1] + tile.value
        gate = tl.load(gate, mask=in_P).to(tl.float32)
        y *= gate / (1 + tl.exp(-gate))
    return y, own, raw


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
    PDL: tl.constexpr,
):
    """Prepare tokens in the first programs, PREPARING per row; read states in the others."""
    wait_for_previous_launch(PDL)
    next_launch_may_begin(PDL)
    program = decode_program(num_rows, tile_bits, HEADS * (P // BLOCK_P), PREPARING)
    row = decode_row(program.row, lengths, slots, starts, ends, depths, tokens_per_decode)
    arrivals += program.row * ARRIVALS_STRIDE
    between = Scratch(scores, vectors, scalars)
    shape = Shape(HEADS, GROUPS, P, N, BLOCK_N, BLOCK_HEADS, ONE_TOKEN)
    if program.index < 0:
        inputs = Inputs(dt, A, B, C, D, dt_bias, dt_min, dt_max, DT_STRIDES, B_STRIDES, C_STRIDES)
        log_B, log_dt = slot_of(log_B, row.slot, B_stride), slot_of(log_dt, row.slot, dt_stride)
        log = Log(log_B, log_dt, slot_of(log_G, row.slot, G_stride))
        prepare(inputs, log, between, row, tl.program_id(0) % PREPARING, shape)
        arrive(arrivals, PREPARING, program.waiting)
    else:
        source, folded = tl.load(src + program.row), tl.load(dst + program.row) != 0
        state += source * slot_elements(slot_stride, state)
        states = States(state, source, folded, slot_of(log_x, row.slot, x_stride), out, OUT_STRIDE)
        tiles = Tiles(HEADS, P, N, BLOCK_P, BLOCK_N, MOST_TILES, PREPARING)
        reads = Reads(x, z, between, X_STRIDES, Z_STRIDES, shape)
        read_states(program, row, states, arrivals, reads, tiles, _read, False)


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
    device = x.get_device()
    bits, pdl = tile_bits(P, block_N, rows * heads, device), overlaps_launches(device)
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
            "PDL": pdl,
        },
        num_warps=1,
        maxnreg=registers(block_N),
        launch_pdl=pdl,
    )
