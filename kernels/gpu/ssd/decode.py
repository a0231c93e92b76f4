"""State-space duality over the decode rows of a batch and their token logs, in two Triton launches."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.chunks import row_and_tile
from ..common.decays import LOG2_E, softplus
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, layer_strides, power_of_2, slot_elements, slot_stride
from ..common.log import (
    DECODE_ARRAYS,
    LEAST_DECAY,
    LEAST_WIDTH,
    PREPARE_ARRAYS,
    ROWS,
    WINDOW,
    entry_scores,
    entry_values,
    for_rows,
    load_state,
    next_launch_may_begin,
    prefetch_entries,
    row_log,
    row_sums,
    scratch,
    slot_of,
    tile_columns,
    tile_rows,
    tiles_of_a_program,
    tiles_of_program,
    wait_for_previous_launch,
)

SCALARS = tl.constexpr(2)  # of one token and head: the decay of the state, and what its x is multiplied with
MAX_HEADS = 16  # that a program of the first launch takes


@triton.jit
def _load_token(
    dt,
    B,
    C,
    token,
    computed,
    head,
    group,
    channel,
    in_group,
    in_N,
    DT_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
):
    """A token's steps, B and C, as they came; zeros unless it is computed."""
    known, mine = tl.where(computed, in_N, False), tl.where(computed, in_group, False)
    size = tl.load(dt + token * DT_STRIDES[0] + head * DT_STRIDES[1], mask=mine, other=0)
    inputs = tl.load(B + token * B_STRIDES[0] + group * B_STRIDES[1] + channel, mask=known, other=0)
    return size, inputs, tl.load(C + token * C_STRIDES[0] + group * C_STRIDES[1] + channel, mask=known, other=0)


@triton.jit(do_not_specialize=["B_stride", "dt_stride", "G_stride", "tokens_per_decode", "dt_min", "dt_max"])
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
    starts,
    ends,
    depths,
    B_stride,
    dt_stride,
    G_stride,
    tokens_per_decode,
    dt_min,
    dt_max,
    DT_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """A program takes BLOCK_HEADS heads of one group of one row. It logs the new tokens' Bs and steps, and leaves each
    token's C, in fp32, in `vectors` [F, G, N], and what it meets in the log in `scores` [F, H, 16].

    Its entry stands in the lane of its depth, where siblings before it stood: in preorder those below are its path. A
    token's inputs are asked for before what comes first is used: each wait is a good part of all. With ONE_TOKEN
    nothing is kept for a next one, which takes half the registers."""
    SHARING: tl.constexpr = HEADS // GROUPS
    TILES: tl.constexpr = (SHARING + BLOCK_HEADS - 1) // BLOCK_HEADS
    wait_for_previous_launch()
    row, program = row_and_tile(GROUPS * TILES)
    group, tile = program // TILES, program % TILES
    channel, entry = tl.arange(0, BLOCK_N), tl.arange(0, WINDOW)
    place_in_group = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    head, in_group = group * SHARING + place_in_group, place_in_group < SHARING
    in_N = channel < N
    of_group = tl.where(tile == 0, in_N, False)  # one of a group's programs stores what is the whole group's
    length = tl.load(lengths + row)
    slot, start, end = row_log(slots, starts, ends, row)
    depth = tl.load(depths + row)
    log_B = slot_of(log_B, slot, B_stride) + group * N
    log_dt, log_G = slot_of(log_dt, slot, dt_stride) + head, slot_of(log_G, slot, G_stride) + head
    rate = tl.load(A + head, mask=in_group, other=0).to(tl.float32) * LOG2_E
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + head, mask=in_group, other=0).to(tl.float32)
    skip = 0.0 if D is None else tl.load(D + head, mask=in_group, other=0).to(tl.float32)

    next_launch_may_begin()
    token = row.to(tl.int64) * tokens_per_decode
    step, raw, reads = _load_token(
        dt, B, C, token, length > 0, head, group, channel, in_group, in_N, DT_STRIDES, B_STRIDES, C_STRIDES
    )
    inside = (entry >= start) & (entry < end)
    Bs = log_B + (entry * (GROUPS * N))[:, None] + channel[None, :]
    Bs = tl.load(Bs, mask=inside[:, None] & in_N[None, :], other=0).to(tl.float32)
    held, place = inside[:, None] & in_group[None, :], (entry * HEADS)[:, None]
    sizes = tl.load(log_dt[None, :] + place, mask=held, other=0)
    Gs = tl.load(log_G[None, :] + place, mask=held, other=0)
    G = tl.load(log_G + (end - 1) * HEADS, mask=tl.where(end > start, in_group, False), other=0)
    lane = end
    for t in range(1 if ONE_TOKEN else tokens_per_decode):
        here = end + t
        next_step, next_raw, next_reads = _load_token(
            dt, B, C, token + 1, t + 1 < length, head, group, channel, in_group, in_N, DT_STRIDES, B_STRIDES, C_STRIDES
        )
        known, mine = tl.where(t < length, in_N, False), tl.where(t < length, in_group, False)
        own, asked = raw.to(tl.float32), reads.to(tl.float32)
        size = tl.minimum(tl.maximum(softplus(step.to(tl.float32) + bias), dt_min), dt_max)
        G += tl.maximum(size * rate, LEAST_DECAY)
        tl.store(log_B + here * (GROUPS * N) + channel, raw, mask=known & of_group)
        tl.store(log_dt + here * HEADS, size, mask=mine)
        tl.store(log_G + here * HEADS, G, mask=mine)

        score = scores + ((token * HEADS + head) * WINDOW)[None, :] + entry[:, None]
        decays = tl.where((entry < lane)[:, None], tl.exp2(G[None, :] - Gs), 0.0)
        met = tl.sum(Bs * asked[None, :], axis=1)[:, None] * decays * sizes
        tl.store(score, met, mask=(entry >= 0)[:, None] & in_group[None, :])
        tl.store(vectors + (token * GROUPS + group) * N + channel, asked, mask=of_group)
        scalar = scalars + (token * HEADS + head) * SCALARS
        tl.store(scalar, tl.exp2(G), mask=in_group)
        tl.store(scalar + 1, tl.sum(own * asked, axis=0) * size + skip, mask=in_group)
        if t + 1 < length:
            new = (entry == lane)[:, None]
            Bs = tl.where(new, own[None, :], Bs)
            sizes, Gs = tl.where(new, size[None, :], sizes), tl.where(new, G[None, :], Gs)
            next_lane = end + (depth >> 4 * (t + 1) & 15)
            if next_lane <= lane:  # a branch: decays go on from its parent's
                G = tl.sum(tl.where((entry == next_lane - 1)[:, None], Gs, 0.0), axis=0)
            lane = next_lane
        token += 1
        step, raw, reads = next_step, next_raw, next_reads


@triton.jit(do_not_specialize=["slot_stride", "x_stride", "tokens_per_decode"])
def _decode_kernel(
    x,
    z,
    state,
    out,
    log_x,
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
    slot_stride,
    x_stride,
    tokens_per_decode,
    X_STRIDES: tl.constexpr,
    Z_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILES: tl.constexpr,
):
    """A program takes TILES tiles of BLOCK_P rows of one head's state past the tokens of one row."""
    next_launch_may_begin()
    row, head, first_value = tiles_of_program(TILES, HEADS, P, BLOCK_P)
    group = head // (HEADS // GROUPS)
    source, length, folded = tl.load(src + row), tl.load(lengths + row), tl.load(dst + row) != 0
    slot, start, end = row_log(slots, starts, ends, row)
    log_x = slot_of(log_x, slot, x_stride) + head * P
    prefetch_entries(log_x + first_value, start, end, HEADS * P, TILES * BLOCK_P)
    depth = tl.load(depths + row)
    lane, channel, entry = tile_rows(BLOCK_P), tile_columns(BLOCK_N), tl.arange(0, WINDOW)
    in_N = channel < N
    element = lane[:, :, None, None] * N + channel
    state += source * slot_elements(slot_stride, state) + (head * P + first_value) * N
    read = tl.broadcast_to(tl.where(source != 0, in_N, False), element.shape)
    for tile in range(TILES):
        value = first_value + tile * BLOCK_P + lane
        S = load_state(state + tile * (BLOCK_P * N) + element, read, folded)
        xs = entry_values(log_x, start, end, value, HEADS * P)
        wait_for_previous_launch()
        for t in range(tokens_per_decode):
            token = row.to(tl.int64) * tokens_per_decode + t
            computed = t < length
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
            tl.store(log_x + (end + t) * (HEADS * P) + value, raw, mask=tl.where(computed, value < P, False))
            if t + 1 < length:
                place = end + (depth >> 4 * t & 15)
                xs = tl.where((entry == place)[None, None, :], own[:, :, None], xs)


_launch_prepare = Launcher(_prepare_kernel)
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
    """Fills the decode tokens of `out` [F, H, P] and logs them. Scratch: 72 H + 4 G N bytes a token."""
    heads, P = x.shape[1:]
    groups, N = B.shape[1:]
    rows, width = indices.num_decodes, indices.tokens_per_decode
    x_strides, dt_strides, B_strides, C_strides, z_strides = layer_strides(x, dt, B, C, x if z is None else z)
    log_x, log_B, log_dt, log_G = log
    sizes = WINDOW.value * heads, groups * N, SCALARS.value * heads
    between = scratch(x, [rows * width * size for size in sizes])
    block_N, block_heads = max(power_of_2(N), LEAST_WIDTH), min(power_of_2(heads // groups), MAX_HEADS)
    _launch_prepare(
        rows * groups * cdiv(heads // groups, block_heads),
        (dt, A, B, C, D, dt_bias, log_B, log_dt, log_G, *between),
        index_pointers(indices, PREPARE_ARRAYS),
        (*map(slot_stride, (log_B, log_dt, log_G)), width, *map(float, dt_limit)),
        {
            "DT_STRIDES": dt_strides,
            "B_STRIDES": B_strides,
            "C_STRIDES": C_strides,
            "HEADS": heads,
            "GROUPS": groups,
            "N": N,
            "BLOCK_N": block_N,
            "BLOCK_HEADS": block_heads,
            "ONE_TOKEN": width == 1,
        },
        num_warps=1,
        launch_pdl=True,
    )
    tiles = tiles_of_a_program(P)
    _launch(
        rows * heads * (P // ROWS // tiles),
        (x, z, state, out, log_x, *between),
        index_pointers(indices, DECODE_ARRAYS),
        (slot_stride(state), slot_stride(log_x), width),
        {
            "X_STRIDES": x_strides,
            "Z_STRIDES": z_strides,
            "OUT_STRIDE": out.stride(0),
            "HEADS": heads,
            "GROUPS": groups,
            "P": P,
            "N": N,
            "BLOCK_N": block_N,
            "BLOCK_P": ROWS,
            "TILES": tiles,
        },
        num_warps=1,
        maxnreg=128 if block_N <= 128 else 255,  # 16 programs a processor: what little it takes more halves them
        launch_pdl=True,
    )
