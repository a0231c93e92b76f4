"""Describe tensor layouts."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ...checks import SLOT_ALIGNMENT

SLOT_UNIT = tl.constexpr(SLOT_ALIGNMENT)


def check_dense(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"The last dim of {name} has stride {tensor.stride(-1)}: make it dense, of stride 1.")


def stride_alignment(tensor: Tensor) -> int:
    """Return elements, up to 16 bytes, that divide all strides before the last."""
    return math.gcd(16 // tensor.element_size(), *tensor.stride()[:-1])


_token_strides: dict[tuple[object, ...], tuple[int, ...]] = {}
_seen: set[tuple[object, ...]] = set()


def layer_strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return strides of a layer's activations [F, ...], constants to the compiler.

    A lone token may lack its stride: it takes the stride of other batches.
    """
    strides = tuple([x.stride() for x in tensors])
    known = (tensors[0].dtype, strides)
    if known in _seen:
        return strides
    layer = tuple((x.dtype, *x.shape[1:], *stride[1:]) for x, stride in zip(tensors, strides, strict=True))
    if len(tensors[0]) > 1:
        _seen.add(known)
        _token_strides[layer] = tuple(stride[0] for stride in strides)
        return strides
    tokens = _token_strides.get(layer, [stride[0] for stride in strides])
    return tuple((token, *stride[1:]) for token, stride in zip(tokens, strides, strict=True))


def cdiv(x: int, y: int) -> int:
    """Round up. Triton's version is slow on the host."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    return 1 << (x - 1).bit_length()


def clear_from(out: Tensor, token: int) -> None:
    if token < out.shape[0]:
        out[token:] = 0


def slot_stride(state: Tensor) -> int:
    """Return a stride in 16 bytes, so kernels know its alignment."""
    return state.stride(0) * state.element_size() // SLOT_ALIGNMENT


@triton.jit
def slot_elements(stride, state):
    return tl.cast(stride, tl.int64) * (SLOT_UNIT * 8 // state.dtype.element_ty.primitive_bitwidth)
