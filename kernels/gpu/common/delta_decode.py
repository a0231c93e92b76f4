"""Decode both delta rules over token logs."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from .delta_prepare import SCALARS, prepare
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


@triton.jit
def _decode(
    v,
    state,
    out,
    log_u,
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
    V_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MOST_TILES: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """Compute u and outputs in `tiles` tiles of BLOCK_V lines."""
    TILES: tl.constexpr = V // BLOCK_V
    ASKED: tl.constexpr = MOST_TILES * BLOCK_V
    head, first_value = first_tile // TILES, first_tile % TILES * BLOCK_V
    key_head = head // (VALUE_HEADS // HEADS)
    log_u += head * V
    state += (head * V + first_value) * K
    prefetch_entries(log_u + first_value // ASKED * ASKED, row.start, row.end, VALUE_HEADS * V, ASKED)
    wait_for_arrivals(arrivals, HEADS, waiting)
    lane, channel, entry = tile_rows(BLOCK_V), tile_columns(BLOCK_K), tl.arange(0, WINDOW)
    in_K = channel < K
    element = lane[:, :, None, None] * K + channel
    read = tl.broadcast_to(tl.where(source != 0, in_K, False), element.shape)
    for tile in range(tiles):
        value = first_value + tile * BLOCK_V + lane
        S = load_state(state + tile * (BLOCK_V * K) + element, read, folded)
        us = entry_values(log_u, row, value, VALUE_HEADS * V)
        for t in range(1 if ONE_TOKEN else row.tokens):
            token = row.row.to(tl.int64) * row.tokens + t
            computed = t < row.length
            vector = vectors + (token * HEADS + key_head) * (2 * K)
            score = scores + (token * VALUE_HEADS + head) * (2 * WINDOW)
            scalar = scalars + (token * VALUE_HEADS + head) * SCALARS
            total = tl.load(scalar + 2)
            x = tl.load(v + token * V_STRIDES[0] + head * V_STRIDES[1] + value, mask=value < V).to(tl.float32)
            by_key = tl.sum(S * for_rows(vector, channel, in_K), axis=2) * total
            by_query = tl.sum(S * for_rows(vector + K, channel, in_K), axis=2) * total
            u = tl.load(scalar) * (x - row_sums(by_key, us * entry_scores(score)))
            o = row_sums(by_query, us * entry_scores(score + WINDOW)) + tl.load(scalar + 1) * u
            o = tl.where(computed, o, 0.0).to(out.dtype.element_ty)
            tl.store(out + token * OUT_STRIDE + head * V + value, o)
            tl.store(log_u + (row.end + t) * (VALUE_HEADS * V) + value, u, mask=tl.where(computed, value < V, False))
            if t + 1 < row.length:
                place, following = row.end + depth_of(row.depths, t), row.end + depth_of(row.depths, t + 1)
                us = tl.where((entry == place)[None, None, :], u[:, :, None], us)
                us = tl.where((entry < following)[None, None, :], us, 0.0)  # siblings, perhaps NaN


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
):
    """Prepare key heads in the first programs; read states in the others."""
    wait_for_previous_launch()
    next_launch_may_begin()
    TILES: tl.constexpr = VALUE_HEADS * (V // BLOCK_V)  # per row
    waiting = TILES >> tile_bits
    program = tl.program_id(0) - num_rows * HEADS
    first_tile = program << tile_bits
    row = tl.where(program < 0, tl.program_id(0) // HEADS, first_tile // TILES)
    batch_row = decode_row(row, lengths, slots, starts, ends, depths, tokens_per_decode)
    slot = batch_row.slot
    arrivals += row * ARRIVALS_STRIDE
    if program < 0:
        prepare(
            q, k, a, b, A_log, dt_bias,
            slot_of(log_k, slot, k_stride), slot_of(log_norm, slot, norm_stride), slot_of(log_G, slot, G_stride),
            scores, vectors, scalars, row, tl.program_id(0) % HEADS,
            batch_row.length, batch_row.start, batch_row.end, batch_row.depths, tokens_per_decode, beta_scale,
            Q_STRIDES, K_STRIDES, A_STRIDES, B_STRIDES,
            HEADS, VALUE_HEADS, K, BLOCK_K, BLOCK_GROUP, CHANNELS, ONE_TOKEN,
        )  # fmt: skip
        arrive(arrivals, HEADS, waiting)
    else:
        source, folded = tl.load(src + row), tl.load(dst + row) != 0
        _decode(
            v, state + source * slot_elements(slot_stride, state), out, slot_of(log_u, slot, u_stride),
            scores, vectors, scalars, arrivals, batch_row, first_tile % TILES, 1 << tile_bits, waiting, source, folded,
            V_STRIDES, OUT_STRIDE, HEADS, VALUE_HEADS, K, V, BLOCK_K, BLOCK_V, MOST_TILES, ONE_TOKEN,
        )  # fmt: skip


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
    bits = tile_bits(V, block_K, rows * value_heads, q.get_device())
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
        },
        num_warps=1,
        maxnreg=registers(block_K),
        launch_pdl=True,
    )
