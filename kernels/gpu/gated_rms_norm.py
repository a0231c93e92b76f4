"""Gated RMSNorm in one Triton launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher
from .layout import cdiv, check_dense, power_of_2, stride_alignment

WARP_TILE = 512  # elements of one warp, and of a program where a group of channels is no wider


@triton.jit(do_not_specialize=["rows", "x_token_stride", "x_group_stride", "gate_token_stride", "gate_group_stride"])
def _gated_rms_norm_kernel(
    x,
    gate,
    weight,
    out,
    rows,
    x_token_stride,
    x_group_stride,
    gate_token_stride,
    gate_group_stride,
    eps,
    GROUPS: tl.constexpr,
    WEIGHT_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_ALIGNMENT: tl.constexpr,
    GATE_ALIGNMENT: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROUND_NORMED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """A row is one group of channels of one token."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, group = (row // GROUPS).to(tl.int64), row % GROUPS
    channel = tl.arange(0, BLOCK_WIDTH)
    mask = (row < rows)[:, None] & (channel < WIDTH)[None, :]
    x_row = tl.multiple_of(token * x_token_stride + group * x_group_stride, X_ALIGNMENT)
    gate_row = tl.multiple_of(token * gate_token_stride + group * gate_group_stride, GATE_ALIGNMENT)
    value = tl.load(x + x_row[:, None] + channel[None, :], mask=mask, other=0).to(tl.float32)
    gates = tl.load(gate + gate_row[:, None] + channel[None, :], mask=mask, other=0).to(tl.float32)
    weight_row = tl.multiple_of(group % WEIGHT_GROUPS * WIDTH, WIDTH & -WIDTH)
    weights = tl.load(weight + weight_row[:, None] + channel[None, :], mask=mask, other=0)

    factor = 1 / (1 + tl.exp(-gates))
    if not SIGMOID:
        factor *= gates
    if not NORM_FIRST:
        value *= factor
    normed = value * tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)[:, None]
    if ROUND_NORMED:
        # The product is taken in the common dtype of x and weight.
        normed = normed.to(x.dtype.element_ty).to(tl.float32) * weights.to(tl.float32)
        if x.dtype.element_ty == weight.dtype.element_ty:
            normed = normed.to(x.dtype.element_ty).to(tl.float32)
    else:
        normed *= weights.to(tl.float32)
    if NORM_FIRST:
        normed *= factor
    out_row = row.to(tl.int64) * WIDTH
    tl.store(out + out_row[:, None] + channel[None, :], normed.to(out.dtype.element_ty), mask=mask)


_launch = Launcher(_gated_rms_norm_kernel)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    round_normed: bool = True,
) -> Tensor:
    """See `mambacache.kernels.gated_rms_norm`. Channels, and all dims but the first, lie evenly spaced in memory."""
    check_dense(x=x, gate=gate, weight=weight)
    width = group_size or x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, gate = (tensor.reshape(x.shape[0], -1, width) for tensor in (x, gate))
    rows = x.shape[0] * x.shape[1]
    block_width = power_of_2(width)
    block_rows = max(WARP_TILE // block_width, 1)
    _launch(
        (cdiv(rows, block_rows), 1, 1),
        (x, gate, weight),
        (out, rows, x.stride(0), x.stride(1), gate.stride(0), gate.stride(1), eps),
        {
            "GROUPS": x.shape[1],
            "WEIGHT_GROUPS": weight.shape[0] // width,
            "WIDTH": width,
            "X_ALIGNMENT": stride_alignment(x),
            "GATE_ALIGNMENT": stride_alignment(gate),
            "SIGMOID": activation == "sigmoid",
            "NORM_FIRST": norm_before_gate,
            "ROUND_NORMED": round_normed,
            "BLOCK_ROWS": block_rows,
            "BLOCK_WIDTH": block_width,
        },
        num_warps=max(block_width // WARP_TILE, 1),
    )
    return out
