"""Handle tokens of a convolution."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.structs import aggregate


@aggregate
class Tokens:
    """Hold x or out [F, DIM] and its gate or None; strides are multiples of ALIGNMENT."""

    values: tl.tensor
    stride: tl.tensor
    gate: tl.tensor
    gate_stride: tl.tensor
    ALIGNMENT: tl.constexpr


@aggregate
class Slots:
    """Hold windows or logs [slots, tokens, DIM]; strides and DIM are multiples of ALIGNMENT."""

    base: tl.tensor
    stride: tl.tensor
    DIM: tl.constexpr
    ALIGNMENT: tl.constexpr


@aggregate
class Filter:
    """Hold taps [BLOCK_D, 4] and bias [BLOCK_D]."""

    taps: tl.tensor
    bias: tl.tensor
    WIDTH: tl.constexpr
    SILU: tl.constexpr


@triton.jit
def slot_of(slots, slot):
    return slots.base + tl.multiple_of(slot * slots.stride, slots.ALIGNMENT)


@triton.jit
def token_of(slots, place, t):
    """Return token t of a slot at `place`."""
    return place + tl.multiple_of(t * slots.DIM, slots.ALIGNMENT)


@triton.jit
def split_taps(conv):
    even, odd = tl.split(tl.reshape(conv.taps.to(tl.float32), [conv.taps.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    taps = (first, second, third, fourth)
    return taps[: conv.WIDTH]


@triton.jit
def load_input(x, t, channel, mask):
    """Load x, times its gate, rounded like the window."""
    value = tl.load(x.values + tl.multiple_of(t * x.stride, x.ALIGNMENT) + channel, mask=mask)
    if x.gate is not None:
        opened = tl.load(x.gate + tl.multiple_of(t * x.gate_stride, x.ALIGNMENT) + channel, mask=mask)
        value = (value.to(tl.float32) * opened.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def store_output(out, t, channel, y, mask):
    """Store y, times its gate; both are rounded."""
    y = y.to(out.values.dtype.element_ty)
    if out.gate is not None:
        opened = tl.load(out.gate + tl.multiple_of(t * out.gate_stride, out.ALIGNMENT) + channel, mask=mask)
        y = (y.to(tl.float32) * opened.to(tl.float32)).to(y.dtype)
    tl.store(out.values + t * out.stride + channel, y, mask=mask)


@triton.jit
def output(conv, inputs, taps):
    """Apply taps to inputs, oldest first."""
    total = conv.bias
    for i in tl.static_range(conv.WIDTH):
        total += taps[i] * inputs[i]
    if conv.SILU:
        total = total / (1 + tl.exp(-total))
    return total


@triton.jit
def store_window(state, slot, history, channel, mask):
    window = slot_of(state, slot) + channel
    for i in tl.static_range(len(history)):
        tl.store(window + i * state.DIM, history[i].to(window.dtype.element_ty), mask=mask)
