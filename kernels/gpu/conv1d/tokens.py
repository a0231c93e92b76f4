"""Handle tokens of a convolution."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_taps(tile, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    even, odd = tl.split(tl.reshape(tile.to(tl.float32), [BLOCK_D, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    taps = (first, second, third, fourth)
    return taps[:WIDTH]


@triton.jit
def load_input(source, t, channel, mask, ALIGNMENT: tl.constexpr):
    """Load x, times its gate, rounded like the window."""
    x, x_stride, gate, gate_stride = source
    value = tl.load(x + tl.multiple_of(t * x_stride, ALIGNMENT) + channel, mask=mask)
    if gate is not None:
        opened = tl.load(gate + tl.multiple_of(t * gate_stride, ALIGNMENT) + channel, mask=mask)
        value = (value.to(tl.float32) * opened.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def store_output(target, t, channel, y, mask, ALIGNMENT: tl.constexpr):
    """Store y, times its gate; both are rounded."""
    out, out_stride, gate, gate_stride = target
    y = y.to(out.dtype.element_ty)
    if gate is not None:
        opened = tl.load(gate + tl.multiple_of(t * gate_stride, ALIGNMENT) + channel, mask=mask)
        y = (y.to(tl.float32) * opened.to(tl.float32)).to(y.dtype)
    tl.store(out + t * out_stride + channel, y, mask=mask)


@triton.jit
def output(inputs, taps, bias, WIDTH: tl.constexpr, SILU: tl.constexpr):
    """Apply taps to inputs, oldest first."""
    total = bias
    for i in tl.static_range(WIDTH):
        total += taps[i] * inputs[i]
    if SILU:
        total = total / (1 + tl.exp(-total))
    return total


@triton.jit
def store_window(slot, history, mask, DIM: tl.constexpr):
    for i in tl.static_range(len(history)):
        tl.store(slot + i * DIM, history[i].to(slot.dtype.element_ty), mask=mask)
