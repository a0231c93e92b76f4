"""State-space duality over the decode rows of a batch, in one Triton launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...indices import StateIndices
from ..common.chunks import DECODE_ARRAYS, decode_token, row_and_tile
from ..common.decays import LOG2_E, softplus
from ..common.launch import Launcher, index_pointers
from ..common.layout import layer_strides, power_of_2, slot_elements, slot_stride

BLOCK_P = 8  # rows of the state of one program, a single warp


@triton.jit(do_not_specialize=["slot_stride", "tokens_per_decode", "dt_min", "dt_max"])
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
):
    """A program carries BLOCK_P rows of one head's state through the tokens of one row."""
    TILES: tl.constexpr = P // BLOCK_P
    STATE: tl.constexpr = state.dtype.element_ty
    row, tile = row_and_tile(HEADS * TILES)
    head = tile // TILES
    group = head // (HEADS // GROUPS)
    value = tile % TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = tl.arange(0, BLOCK_N)
    in_N = channel < N
    rate = tl.load(A + head).to(tl.float32) * LOG2_E

    state += head * P * N
    element = value[:, None] * N + channel[None, :]
    slot_stride = slot_elements(slot_stride, state)
    source, length = tl.load(src + row), tl.load(lengths + row)
    read = tl.where(source != 0, in_N, False)[None, :]
    S = tl.load(state + source * slot_stride + element, mask=read, other=0).to(tl.float32)
    for t in range(tokens_per_decode):
        token, target, computed = decode_token(row, t, tokens_per_decode, length, dst)
        known = tl.where(computed, in_N, False)
        inputs = tl.load(B + token * B_STRIDES[0] + group * B_STRIDES[1] + channel, mask=known, other=0).to(tl.float32)
        reads = tl.load(C + token * C_STRIDES[0] + group * C_STRIDES[1] + channel, mask=known, other=0).to(tl.float32)
        known = tl.where(computed, value < P, False)
        values = tl.load(x + token * X_STRIDES[0] + head * X_STRIDES[1] + value, mask=known, other=0).to(tl.float32)
        size = tl.load(dt + token * DT_STRIDES[0] + head * DT_STRIDES[1], mask=computed, other=0).to(tl.float32)
        if dt_bias is not None:
            size += tl.load(dt_bias + head).to(tl.float32)
        size = tl.minimum(tl.maximum(softplus(size), dt_min), dt_max)

        S = tl.exp2(size * rate) * S + (size * values)[:, None] * inputs[None, :]
        y = tl.sum(S * reads[None, :], axis=1)
        if D is not None:
            y += tl.load(D + head).to(tl.float32) * values
        if z is not None:
            gate = tl.load(z + token * Z_STRIDES[0] + head * Z_STRIDES[1] + value, mask=known, other=0).to(tl.float32)
            y *= gate / (1 + tl.exp(-gate))
        y = tl.where(computed, y, 0.0).to(out.dtype.element_ty)
        tl.store(out + token * OUT_STRIDE + head * P + value, y)
        S = S.to(STATE)
        written = tl.where(target != 0, in_N, False)[None, :]
        tl.store(state + target * slot_stride + element, S, mask=written)
        S = S.to(tl.float32)


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
    indices: StateIndices,
    dt_limit: tuple[float, float],
    out: Tensor,
) -> None:
    """Fills the decode tokens of `out` [F, H, P] and stores the state after every token where `decode_dst` says."""
    heads, P = x.shape[1:]
    groups, N = B.shape[1:]
    x_strides, dt_strides, B_strides, C_strides, z_strides = layer_strides(x, dt, B, C, x if z is None else z)
    _launch(
        heads * (P // BLOCK_P) * indices.num_decodes,
        (x, dt, A, B, C, D, z, dt_bias, state, out),
        index_pointers(indices, DECODE_ARRAYS),
        (slot_stride(state), indices.tokens_per_decode, *map(float, dt_limit)),
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
            "BLOCK_N": power_of_2(N),
            "BLOCK_P": BLOCK_P,
        },
        num_warps=1,
    )
