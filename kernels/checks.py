"""Check arguments of ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .indices import StateIndices
from .state_pool import StateTensor

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SLOT_ALIGNMENT = 16  # bytes


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)} where the other arguments need {list(shape)}.")


def check_rank(name: str, tensor: Tensor, dims: str) -> None:
    if tensor.dim() != dims.count(",") + 1:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but it must be [{dims}].")


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {str(tensor.dtype).removeprefix('torch.')} where {wanted} is needed.")


def check_one_of(name: str, value: object, *choices: object) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but it must be one of {', '.join(map(repr, choices))}.")


def check_tokens(name: str, tensor: Tensor, indices: StateIndices) -> None:
    if tensor.shape[0] != indices.num_tokens:
        raise ValueError(f"{name} has {tensor.shape[0]} tokens, but the indices were made for {indices.num_tokens}.")


def check_devices(indices: StateIndices, **tensors: Tensor | None) -> None:
    device = indices.device
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, but the indices are on {device}: move it there.")


def check_head_widths(**widths: int) -> None:
    for name, width in widths.items():
        if width % 16 or not 0 < width <= 256:
            raise ValueError(f"{name} is {width}, but head widths must be multiples of 16 up to 256.")


def _dense_size(name: str, tensor: Tensor, row: str) -> int:
    """Return the elements of an entry along dim 0, which must be dense."""
    shape, strides = tensor.shape, tensor.stride()
    size = 1
    for dim in range(len(strides) - 1, 0, -1):
        if strides[dim] != size and shape[dim] > 1:
            raise ValueError(f"Every {row} of {name} must be contiguous: only the stride between {row}s is free.")
        size *= shape[dim]
    return size


def check_out(out: Tensor, like: Tensor, *shape: int) -> None:
    """Check `out`: its tokens are dense and do not overlap."""
    check_shape("out", out, *shape)
    check_dtype("out", out, like.dtype)
    if out.device != like.device:
        raise ValueError(f"out is on {out.device}, but the inputs are on {like.device}: give memory there.")
    tokens = out if out.dim() > 1 else out[None]
    size = _dense_size("out", tokens, "token")
    if tokens.shape[0] > 1 and tokens.stride(0) < size:
        raise ValueError(
            f"Tokens of out must not overlap, but they start {tokens.stride(0)} elements apart and have {size}."
        )


def check_pool(state: Tensor, name: str = "state") -> None:
    """Check that slots are dense, do not overlap, and start at multiples of 16 bytes."""
    size = _dense_size(name, state, "row")
    stride = state.stride(0) * state.element_size()
    if stride % SLOT_ALIGNMENT or state.data_ptr() % SLOT_ALIGNMENT or state.stride(0) < size:
        raise ValueError(
            f"Rows of {name} must not overlap and must start at multiples of {SLOT_ALIGNMENT} bytes, but they start"
            f" {stride} bytes apart at address {state.data_ptr()}."
        )


def check_log(log: Sequence[Tensor], layout: Sequence[StateTensor], indices: StateIndices) -> None:
    """Check a token log against `layout`, if the step has decode rows."""
    if not indices.num_decodes:
        return
    if len(log) != len(layout):
        raise ValueError(
            f"The log has {len(log)} tensors, but decode rows need {len(layout)}: see mambacache.kernels.logs."
        )
    for i, (tensor, wanted) in enumerate(zip(log, layout, strict=True)):
        check_shape(f"tensor {i} of the log", tensor, tensor.shape[0], *wanted.shape)
        check_dtype(f"tensor {i} of the log", tensor, wanted.dtype)
        check_pool(tensor, f"tensor {i} of the log")
    check_devices(indices, **{f"tensor {i} of the log": tensor for i, tensor in enumerate(log)})


def check_delta_rule(q: Tensor, k: Tensor, v: Tensor, state: Tensor, indices: StateIndices) -> None:
    check_rank("q", q, "F, H, K")
    check_rank("v", v, "F, HV, V")
    check_rank("state", state, "blocks, HV, V, K")
    check_dtype("q", q, *ACTIVATION_DTYPES)
    check_dtype("k", k, q.dtype)
    check_dtype("v", v, q.dtype)
    check_dtype("state", state, *ACTIVATION_DTYPES)
    check_tokens("q", q, indices)
    heads, width = v.shape[1:]
    check_head_widths(K=q.shape[2], V=width)
    if heads % q.shape[1]:
        raise ValueError(f"{heads} value heads cannot share {q.shape[1]} key heads: HV must be a multiple of H.")
    check_shape("k", k, *q.shape)
    check_shape("v", v, q.shape[0], heads, width)
    check_shape("state", state, state.shape[0], heads, width, q.shape[2])
    check_pool(state)


def check_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    check_rank("pairs", pairs, "n, 2")
    check_dtype("pairs", pairs, torch.int32)
    check_shape("pairs", pairs, len(pairs), 2)
    for name, pool in (("source", source), ("target", target)):
        check_rank(name, pool, "blocks, bytes")
        check_dtype(name, pool, torch.uint8)
        check_shape(name, pool, len(pool), source.shape[1])
        if pool.stride(1) != 1 or pool.stride(0) % SLOT_ALIGNMENT or pool.data_ptr() % SLOT_ALIGNMENT:
            raise ValueError(
                f"The blocks of {name} must be contiguous, and begin at multiples of {SLOT_ALIGNMENT} bytes."
            )
        if pool.device != pairs.device and not (pairs.is_cuda and pool.is_pinned()):
            raise ValueError(
                f"{name} is on {pool.device} and pairs on {pairs.device}: move it there, or pin its memory."
            )
    if source.shape[1] % SLOT_ALIGNMENT:
        raise ValueError(f"A block has {source.shape[1]} bytes, but it must be a multiple of {SLOT_ALIGNMENT}.")
