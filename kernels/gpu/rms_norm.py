"""Implement `rms_norm`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common.launch import NO_POINTERS, Launcher
from .common.layout import cdiv, check_dense, power_of_2, stride_alignment
from .gated_rms_norm import MAX_WIDTH, WARP_TILE


@triton.jit
def _load_weight(weight, channel, WIDTH: tl.constexpr):
    weights = tl.full(channel.shape, 1, tl.float32)
    if weight is not None:
        weights = tl.load(weight + channel, mask=channel < WIDTH, other=0).to(tl.float32)
    return weights


@triton.jit
def _store(out, normed, weights, mask, X: tl.constexpr, ROUND_NORMED: tl.constexpr):
    if ROUND_NORMED:
        normed = normed.to(X).to(tl.float32)
    tl.store(out, (normed * weights).to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["rows", "inner", "x_outer_stride", "x_inner_stride", "out_outer_stride", "out_inner_stride"]
)
def _rms_norm_kernel(
    x,
    weight,
    out,
    rows,
    inner,
    x_outer_stride,
    x_inner_stride,
    out_outer_stride,
    out_inner_stride,
    eps,
    WIDTH: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    ROUND_NORMED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Normalise lines; a line wider than a tile is read twice."""
    X: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outer, inner_row = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    channel = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (row < rows)[:, None]
    x += ((outer * x_outer_stride + inner_row * x_inner_stride) * X_UNIT)[:, None] + channel
    out += ((outer * out_outer_stride + inner_row * out_inner_stride) * OUT_UNIT)[:, None] + channel
    mask = inside & (channel < WIDTH)
    value = tl.load(x, mask=mask, other=0).to(tl.float32)
    weights = _load_weight(weight, channel, WIDTH)
    total = tl.sum(value * value, axis=1)
    for first in range(BLOCK_WIDTH, WIDTH, BLOCK_WIDTH):
        other = tl.load(x + first, mask=inside & (first + channel < WIDTH), other=0).to(tl.float32)
        total += tl.sum(other * other, axis=1)
    scale = tl.rsqrt(total / WIDTH + eps)[:, None]
    _store(out, value * scale, weights, mask, X, ROUND_NORMED)
    for first in range(BLOCK_WIDTH, WIDTH, BLOCK_WIDTH):
        rest = inside & (first + channel < WIDTH)
        value = tl.load(x + first, mask=rest, other=0).to(tl.float32)
        weights = _load_weight(weight, first + channel, WIDTH)
        _store(out + first, value * scale, weights, rest, X, ROUND_NORMED)


_launch = Launcher(_rms_norm_kernel)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, round_normed: bool, out: Tensor | None = None) -> Tensor:
    """See `mambacache.kernels.rms_norm`. Inputs not evenly spaced after dim 0 are copied."""
    check_dense(x=x, weight=weight)
    if out is None:
        dtype = torch.promote_types(x.dtype, weight.dtype) if round_normed and weight is not None else x.dtype
        out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    x, rows = _rows(x), _rows(out)
    outer, inner, width = x.shape
    x_unit, out_unit = stride_alignment(x), stride_alignment(rows)
    (x_outer, x_inner, _), (out_outer, out_inner, _) = x.stride(), rows.stride()
    block_width = min(power_of_2(width), MAX_WIDTH)
    block_rows = max(WARP_TILE // block_width, 1)
    _launch(
        cdiv(outer * inner, block_rows),
        (x, weight, rows),
        NO_POINTERS,
        (
            outer * inner,
            inner,
            x_outer // x_unit,
            x_inner // x_unit,
            out_outer // out_unit,
            out_inner // out_unit,
            eps,
        ),
        {
            "WIDTH": width,
            "X_UNIT": x_unit,
            "OUT_UNIT": out_unit,
            "ROUND_NORMED": round_normed,
            "BLOCK_ROWS": block_rows,
            "BLOCK_WIDTH": block_width,
        },
        num_warps=max(block_width // WARP_TILE, 1),
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """Return [outer, inner, width], without leading dims of 1."""
    while x.dim() < 3:
        x = x[None]
    while x.dim() > 3 and x.shape[0] == 1:
        x = x[0]
    return x if x.dim() == 3 else x.flatten(1, -2)
