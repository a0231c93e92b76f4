"""Selective scan over the decode rows of a batch, in one Triton launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.chunks import DECODE_ARRAYS, decode_token, row_and_tile
from ..common.launch import Launcher, index_pointers
from ..common.layout import cdiv, layer_strides, slot_elements, slot_stride
from .math import (
    advance,
    channels_of,
    first_state,
    in_log2,
    load_states,
    of_lane,
    rounded,
    silu,
    step_size,
    store_states,
    tile_of,
)

LANES = 4  # of a warp share one channel, at a state size of 16


@triton.jit(do_not_specialize=["slot_stride", "tokens_per_decode"])
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
    src,
    lengths,
    dst,
    slot_stride,
    tokens_per_decode,
    STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A program, a warp, carries the states of GROUPS times 32 / LANES channels through the tokens of one row.

    A lane knows the step and gate of one channel at most, and holds some states of one channel of each group.
    """
    STATE: tl.constexpr = state.dtype.element_ty
    CHANNELS: tl.constexpr = 32 // LANES
    FOURS: tl.constexpr = BLOCK_N // (4 * LANES)
    lane = tl.arange(0, LANES)[:, None, None]
    row, tile = row_and_tile((DIM + GROUPS * CHANNELS - 1) // (GROUPS * CHANNELS))
    first = tile * (GROUPS * CHANNELS) + channels_of(CHANNELS)
    n = first_state(LANES, FOURS)
    slot_stride = slot_elements(slot_stride, state)
    source, length = tl.load(src + row), tl.load(lengths + row)
    token, target, computed = decode_token(row, 0, tokens_per_decode, length, dst)
    S, rates, elements, insides = (), (), (), ()
    for j in tl.static_range(GROUPS):
        channel = first + j * CHANNELS
        element, inside = channel * N + n, channel < DIM
        present = tl.where(source != 0, inside, False)
        S = S + (load_states(state, source * slot_stride + element, n, present, N, FOURS),)
        rates = rates + (in_log2(load_states(A, element, n, inside, N, FOURS)),)
        elements, insides = elements + (element,), insides + (inside,)
    channel = first + lane * CHANNELS
    in_dim = (lane < GROUPS) & (channel < DIM)
    skip = tl.load(D + channel, mask=in_dim, other=0).to(tl.float32)
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + channel, mask=in_dim, other=0).to(tl.float32)
    for t in range(tokens_per_decode):
        known, row_known = tl.where(computed, in_dim, False), tl.where(computed, n < N, False)
        u = tl.load(x + token * STRIDES[0] + channel, mask=known, other=0).to(tl.float32)
        step = step_size(tl.load(dt + token * STRIDES[1] + channel, mask=known, other=0).to(tl.float32), bias)
        b = load_states(B, token * STRIDES[3] + n, n, row_known, N, FOURS)
        c = load_states(C, token * STRIDES[4] + n, n, row_known, N, FOURS)
        gate = 1.0 if z is None else silu(tl.load(z + token * STRIDES[2] + channel, mask=known, other=0).to(tl.float32))
        y, states = tl.zeros_like(step), ()
        for j in tl.static_range(GROUPS):
            after, read = advance(S[j], of_lane(step, j), of_lane(step * u, j), rates[j], b, c)
            after = rounded(after, STATE)
            stored = tl.where(target != 0, insides[j], False)
            store_states(state, target * slot_stride + elements[j], n, stored, after, N)
            y, states = tl.where(lane == j, read, y), states + (after,)
        S = states
        y = tl.where(computed, tl.fma(skip, u, y) * gate, 0.0)
        tl.store(out + token * OUT_STRIDE + channel, y.to(out.dtype.element_ty), mask=in_dim)
        following = tl.minimum(t + 1, tokens_per_decode - 1)
        token, target, computed = decode_token(row, following, tokens_per_decode, length, dst)


_launch = Launcher(_decode_kernel)


def decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    indices: StateIndices,
    out: Tensor,
) -> None:
    """Fills the decode tokens of `out` [F, dim] and stores the state after every token where `decode_dst` says."""
    dim, width = A.shape
    strides = tuple(stride for stride, _ in layer_strides(x, dt, x if z is None else z, B, C))
    block_N, lanes = tile_of(width, LANES)
    groups = min(lanes, max(128 // block_N, 1))
    _launch(
        cdiv(dim, 32 // lanes * groups) * indices.num_decodes,
        (x, dt, A, B, C, D, z, dt_bias, state, out),
        index_pointers(indices, DECODE_ARRAYS),
        (slot_stride(state), indices.tokens_per_decode),
        {
            "STRIDES": strides,
            "OUT_STRIDE": out.stride(0),
            "DIM": dim,
            "N": width,
            "BLOCK_N": block_N,
            "LANES": lanes,
            "GROUPS": groups,
        },
        num_warps=1,
    )
