"""Decode both delta rules over token logs."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...device import overlaps_launches
from ...indices import StateIndices
from .decode import States, Tiles, decode_program, read_states
from .delta_prepare import SCALARS, Inputs, Log, Scratch, Shape, prepare
from .launch import Launcher, index_pointers
from .layout import layer_strides, power_of_2, slot_elements, slot_stride
from .log import (
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
from .structs import aggregate


@aggregate
class Reads:
    v: tl.tensor
    scratch: tl.tensor
    V_STRIDES: tl.constexpr
    HEADS: tl.constexpr
    VALUE_HEADS: tl.constexpr
    K: tl.constexpr
    V: tl.constexpr


@triton.jit
def _read(reads, token, tile):
    key_head = tile.head // (reads.VALUE_HEADS // reads.HEADS)
    vector = reads.scratch.vectors + (token * reads.HEADS + key_head) * (2 * reads.K)
    score = reads.scratch.scores + (token * reads.VALUE_HEADS + tile.head) * (2 * WINDOW)
    scalar = reads.scratch.scalars + (token * reads.VALUE_HEADS + tile.head) * SCALARS
    total = tl.load(scalar + 2)
    v = reads.v + token * reads.V_STRIDES[0] + tile.head * reads.V_STRIDES[1] + tile.value
    v = tl.load(v, mask=tile.value < reads.V).to(tl.float32)
    by_key = tl.sum(tile.S * for_rows(vector, tile.channel, tile.in_K), axis=2) * total
    by_query = tl.sum(tile.S * for_rows(vector + reads.K, tile.channel, tile.in_K), axis=2) * total
    u = tl.load(scalar) * (v - row_sums(by_key, tile.entries * entry_scores(score)))
    o = row_sums(by_query, tile.entries * entry_scores(score + WINDOW)) + tl.load(scalar + 1) * u
    return o, u, u


@triton.jit(
    do_not_specialize=[
        "slot_stride", "k_stride", "norm_stride", "u_stride", "G_stride", "num_rows", "tokens_per_decode", "tile_bits",
        "beta_scale",
    ]
)  # fmt: skip
def _decode_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    state,
    out,
    log_k,
    log_norm,
    log_u,
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
    k_stride,
    norm_stride,
    u_stride,
    G_stride,
    num_rows,
    tokens_per_decode,
    tile_bits,
    beta_scale,
    Q_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    A_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    MOST_TILES: tl.constexpr,
    CHANNELS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_launch(PDL)
    next_launch_may_begin(PDL)
    TILES: tl.constexpr = VALUE_HEADS * (V // BLOCK_V)  # per row
    program = decode_program(num_rows, tile_bits, TILES, HEADS)
    row = program.row
    batch_row = decode_row(row, lengths, slots, starts, ends, depths, tokens_per_decode)
    slot = batch_row.slot
    arrivals += row * ARRIVALS_STRIDE
    between = Scratch(scores, vectors, scalars)
    if program.index < 0:
        log = Log(slot_of(log_k, slot, k_stride), slot_of(log_norm, slot, norm_stride), slot_of(log_G, slot, G_stride))
        inputs = Inputs(q, k, a, b, Q_STRIDES, K_STRIDES, A_STRIDES, B_STRIDES)
        shape = Shape(HEADS, VALUE_HEADS, K, BLOCK_K, BLOCK_GROUP, CHANNELS, ONE_TOKEN)
        prepare(inputs, A_log, dt_bias, beta_scale, log, between, batch_row, tl.program_id(0) % HEADS, shape)
        arrive(arrivals, HEADS, program.waiting)
    else:
        source, folded = tl.load(src + row), tl.load(dst + row) != 0
        state += source * slot_elements(slot_stride, state)
        states = States(state, source, folded, slot_of(log_u, slot, u_stride), out, OUT_STRIDE)
        tiles = Tiles(VALUE_HEADS, V, K, BLOCK_V, BLOCK_K, MOST_TILES, HEADS)
        reads = Reads(v, between, V_STRIDES, HEADS, VALUE_HEADS, K, V)
        read_states(program, batch_row, states, arrivals, reads, tiles, _read, ONE_TOKEN)


_launch = Launcher(_decode_kernel)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    beta_scale: float,
    out: Tensor,
) -> None:
    """Fill the decode tokens of `out` [F, HV, V] and their logs; KDA passes g as a.

    Scratch: 140 HV + 8 H K bytes a token.
    """
    heads, K = k.shape[1:]
    value_heads, V = v.shape[1:]
    rows, width = indices.num_decodes, indices.tokens_per_decode
    q_strides, k_strides, v_strides, a_strides, b_strides = layer_strides(q, k, v, a, b)
    sizes = 2 * WINDOW.value * value_heads, 2 * heads * K, SCALARS.value * value_heads
    block_K = max(power_of_2(K), LEAST_WIDTH)
    device = q.get_device()
    bits, pdl = tile_bits(V, block_K, rows * value_heads, device), overlaps_launches(device)
    _launch(
        rows * (heads + (value_heads * (V // ROWS) >> bits)),
        (q, k, v, a, b, A_log, dt_bias, state, out, *log, *scratch(v, [rows * width * size for size in sizes])),
        index_pointers(indices, DECODE_ARRAYS),
        (*map(slot_stride, (state, *log)), rows, width, bits, float(beta_scale)),
        {
            "Q_STRIDES": q_strides,
            "K_STRIDES": k_strides,
            "V_STRIDES": v_strides,
            "A_STRIDES": a_strides,
            "B_STRIDES": b_strides,
            "OUT_STRIDE": out.stride(0),
            "HEADS": heads,
            "VALUE_HEADS": value_heads,
            "K": K,
            "V": V,
            "BLOCK_K": block_K,
            "BLOCK_V": ROWS,
            "BLOCK_GROUP": power_of_2(value_heads // heads),
            "MOST_TILES": most_tiles(V),
            "CHANNELS": a.dim() == 3,
            "ONE_TOKEN": width == 1,
            "PDL": pdl,
        },
        num_warps=1,
        maxnreg=registers(block_K),
        launch_pdl=pdl,
    )
