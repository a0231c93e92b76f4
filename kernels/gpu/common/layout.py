"""What kernels need of the layout of tensors, and what they may assume of addresses."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from ...checks import SLOT_ALIGNMENT

SLOT_UNIT = tl.constexpr(SLOT_ALIGNMENT)


def check_dense(**tensors: Tensor | None) -> None:
    """Raises ValueError unless elements of the last dim lie side by side."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"The last dim of {name} has stride {tensor.stride(-1)}: make it dense, of stride 1.")


def stride_alignment(tensor: Tensor) -> int:
    """Elements, up to 16 bytes, of which every stride but that of the last dim is a multiple.

    It depends on a layer's layout, never on a batch. (Of the address itself Triton keeps account.)
    """
    return math.gcd(16 // tensor.element_size(), *tensor.stride()[:-1])


_token_strides: dict[tuple[object, ...], tuple[int, ...]] = {}
_seen: set[tuple[object, ...]] = set()


def layer_strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """The strides of a layer's activations [F, ...]: the same in every batch, hence constants to the compiler.

    A lone token's view may have lost the stride of tokens, which it does not need. It takes that of the layer's other
    batches, so that it runs the kernels that were compiled for them.
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
    """x / y rounded up. (Triton's function of this name takes a hundred times as long on the host.)"""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The smallest power of 2 that is at least x, as a block of a kernel has to be."""
    return 1 << (x - 1).bit_length()


def clear_from(out: Tensor, token: int) -> None:
    """Zeros in the tokens of `out` from one on, if there are any: padding, which belongs to no row."""
    if token < out.shape[0]:
        out[token:] = 0


def slot_stride(state: Tensor) -> int:
    """The stride of a pool's rows in units of 16 bytes, so that a kernel knows that it is a multiple of them."""
    return state.stride(0) * state.element_size() // SLOT_ALIGNMENT


@triton.jit
def slot_elements(stride, state):
    """What `slot_stride` gives, in elements."""
    return tl.cast(stride, tl.int64) * (SLOT_UNIT * 8 // state.dtype.element_ty.primitive_bitwidth)
