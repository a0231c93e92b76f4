"""What every token of a convolution needs: its inputs, taps and output."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_taps(tile, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """The WIDTH columns of a tile [BLOCK_D, 4], in fp32."""
    even, odd = tl.split(tl.reshape(tile.to(tl.float32), [BLOCK_D, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    taps = (first, second, third, fourth)
    return taps[:WIDTH]


@triton.jit
def load_input(source, t, channel, mask, ALIGNMENT: tl.constexpr):
    """The convolution's input at token t: x, or x times its gate, rounded as the window will hold it."""
    x, x_stride, gate, gate_stride = source
    value = tl.load(x + tl.multiple_of(t * x_stride, ALIGNMENT) + channel, mask=mask)
    if gate is not None:
        opened = tl.load(gate + tl.multiple_of(t * gate_stride, ALIGNMENT) + channel, mask=mask)
        value = (value.to(tl.float32) * opened.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def store_output(target, t, channel, y, mask, ALIGNMENT: tl.constexpr):
    """Stores the output of token t, times its gate if there is one; both are rounded, as by two modules."""
    out, out_stride, gate, gate_stride = target
    y = y.to(out.dtype.element_ty)
    if gate is not None:
        opened = tl.load(gate + tl.multiple_of(t * gate_stride, ALIGNMENT) + channel, mask=mask)
        y = (y.to(tl.float32) * opened.to(tl.float32)).to(y.dtype)
    tl.store(out + t * out_stride + channel, y, mask=mask)


@triton.jit
def output(inputs, taps, bias, WIDTH: tl.constexpr, SILU: tl.constexpr):
    """The output of one token from the last WIDTH inputs, oldest first."""
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
