"""Selective scan over the decode rows of a batch, in one Triton launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..indices import StateIndices
from .chunks import decode_token
from .decays import LOG2_E
from .launch import Launcher
from .layout import layer_strides, slot_elements, slot_stride
from .selective_scan_math import silu, step_size

BLOCK_D = 64  # channels of a program, a single warp, where a channel has 16 states


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
    dst,
    slot_stride,
    tokens_per_decode,
    STRIDES: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program carries the states of BLOCK_D channels through the tokens of one row."""
    STATE: tl.constexpr = state.dtype.element_ty
    row = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    in_dim, in_state = channel < DIM, n < N
    element = channel[:, None] * N + n[None, :]
    inside = in_dim[:, None] & in_state[None, :]
    slot_stride = slot_elements(slot_stride, state)
    source = tl.load(src + row)
    read = tl.where(source != 0, inside, False)
    S = tl.load(state + source * slot_stride + element, mask=read, other=0).to(tl.float32)
    rate = tl.load(A + element, mask=inside, other=0).to(tl.float32) * LOG2_E
    skip = tl.load(D + channel, mask=in_dim, other=0).to(tl.float32)
    bias = 0.0 if dt_bias is None else tl.load(dt_bias + channel, mask=in_dim, other=0).to(tl.float32)
    for t in range(tokens_per_decode):
        token, target, computed = decode_token(row, t, tokens_per_decode, source, dst)
        known, known_state = tl.where(computed, in_dim, False), tl.where(computed, in_state, False)
        u = tl.load(x + token * STRIDES[0] + channel, mask=known, other=0).to(tl.float32)
        step = step_size(tl.load(dt + token * STRIDES[1] + channel, mask=known, other=0).to(tl.float32), bias)
        b = tl.load(B + token * STRIDES[3] + n, mask=known_state, other=0).to(tl.float32)
        c = tl.load(C + token * STRIDES[4] + n, mask=known_state, other=0).to(tl.float32)
        S = tl.fma(tl.exp2(step[:, None] * rate), S, (step * u)[:, None] * b[None, :])
        y = tl.fma(skip, u, tl.sum(S * c[None, :], axis=1))
        if z is not None:
            y = y * silu(tl.load(z + token * STRIDES[2] + channel, mask=known, other=0).to(tl.float32))
        y = tl.where(computed, y, 0.0)
        tl.store(out + token * DIM + channel, y.to(out.dtype.element_ty), mask=in_dim)
        stored = S.to(STATE)
        tl.store(state + target * slot_stride + element, stored, mask=tl.where(target != 0, inside, False))
        S = stored.to(tl.float32)


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
    block_N = triton.next_power_of_2(width)
    block_D = max(BLOCK_D * 16 // block_N, 1)
    _launch(
        (triton.cdiv(dim, block_D), indices.num_decodes, 1),
        (x, dt, A, B, C, D, z, dt_bias, state, out),
        (
            indices.decode_src,
            indices.decode_dst,
            slot_stride(state),
            indices.tokens_per_decode,
        ),
        {"STRIDES": strides, "DIM": dim, "N": width, "BLOCK_N": block_N, "BLOCK_D": block_D},
        num_warps=1,
    )
