"""Implement `gated_rms_norm`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common.launch import NO_POINTERS, Launcher
from .common.layout import cdiv, check_dense, power_of_2, stride_alignment

WARP_TILE = 512  # elements per warp
MAX_WIDTH = 32 * WARP_TILE  # at most 32 warps


@triton.jit
def _load(x, gate, weight, mask, SIGMOID: tl.constexpr, NORM_FIRST: tl.constexpr):
    value = tl.load(x, mask=mask, other=0).to(tl.float32)
    gates = tl.load(gate, mask=mask, other=0).to(tl.float32)
    weights = tl.load(weight, mask=mask, other=0)
    factor = 1 / (1 + tl.exp(-gates))
    if not SIGMOID:
        factor *= gates
    if not NORM_FIRST:
        value *= factor
    return value, factor, weights


@triton.jit
def _store(out, normed, factor, weights, mask, X: tl.constexpr, NORM_FIRST: tl.constexpr, ROUND_NORMED: tl.constexpr):
    if ROUND_NORMED:
        # in the common dtype of x and weight
        normed = normed.to(X).to(tl.float32) * weights.to(tl.float32)
        if X == weights.dtype:
            normed = normed.to(X).to(tl.float32)
    else:
        normed *= weights.to(tl.float32)
    if NORM_FIRST:
        normed *= factor
    tl.store(out, normed.to(out.dtype.element_ty), mask=mask)


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
    X_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    ROUND_NORMED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Normalise groups of channels; a group wider than a tile is read twice."""
    X: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, group = (row // GROUPS).to(tl.int64), row % GROUPS
    channel = tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (row < rows)[:, None]
    x += ((token * x_token_stride + group * x_group_stride) * X_UNIT)[:, None] + channel
    gate += ((token * gate_token_stride + group * gate_group_stride) * GATE_UNIT)[:, None] + channel
    weight += (group % WEIGHT_GROUPS * WIDTH)[:, None] + channel
    out += (token * OUT_STRIDE + group * WIDTH)[:, None] + channel
    mask = inside & (channel < WIDTH)
    value, factor, weights = _load(x, gate, weight, mask, SIGMOID, NORM_FIRST)
    total = tl.sum(value * value, axis=1)
    for first in range(BLOCK_WIDTH, WIDTH, BLOCK_WIDTH):
        rest = inside & (first + channel < WIDTH)
        other, _, _ = _load(x + first, gate + first, weight + first, rest, SIGMOID, NORM_FIRST)
        total += tl.sum(other * other, axis=1)
    scale = tl.rsqrt(total / WIDTH + eps)[:, None]
    _store(out, value * scale, factor, weights, mask, X, NORM_FIRST, ROUND_NORMED)
    for first in range(BLOCK_WIDTH, WIDTH, BLOCK_WIDTH):
        rest = inside & (first + channel < WIDTH)
        value, factor, weights = _load(x + first, gate + first, weight + first, rest, SIGMOID, NORM_FIRST)
        _store(out + first, value * scale, factor, weights, rest, X, NORM_FIRST, ROUND_NORMED)


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
    out: Tensor | None = None,
) -> Tensor:
    """See `mambacache.kernels.gated_rms_norm`. Inputs not evenly spaced after dim 0 are copied."""
    check_dense(x=x, gate=gate, weight=weight)
    width = group_size or x.shape[-1]
    out = x.new_empty(x.shape) if out is None else out
    if not out.numel():
        return out
    tokens = x.shape[0] if x.dim() > 1 else 1
    x, gate = x.reshape(tokens, -1, width), gate.reshape(tokens, -1, width)
    groups = x.shape[1]
    x_unit, gate_unit = stride_alignment(x), stride_alignment(gate)
    (x_token, x_group, _), (gate_token, gate_group, _) = x.stride(), gate.stride()
    block_width = min(power_of_2(width), MAX_WIDTH)
    block_rows = max(WARP_TILE // block_width, 1)
    _launch(
        cdiv(tokens * groups, block_rows),
        (x, gate, weight, out),
        NO_POINTERS,
        (
            tokens * groups,
            x_token // x_unit,
            x_group // x_unit,
            gate_token // gate_unit,
            gate_group // gate_unit,
            eps,
        ),
        {
            "GROUPS": groups,
            "WEIGHT_GROUPS": weight.shape[0] // width,
            "WIDTH": width,
            "X_UNIT": x_unit,
            "GATE_UNIT": gate_unit,
            "OUT_STRIDE": out.stride(0),
            "SIGMOID": activation == "sigmoid",
            "NORM_FIRST": norm_before_gate,
            "ROUND_NORMED": round_normed,
            "BLOCK_ROWS": block_rows,
            "BLOCK_WIDTH": block_width,
        },
        num_warps=max(block_width // WARP_TILE, 1),
    )
    return out
