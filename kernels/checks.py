"""Checks of what callers pass to an op: one sentence that says what is wrong and what is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from .indices import StateIndices

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SLOT_ALIGNMENT = 16  # bytes


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)} where the other arguments need {list(shape)}.")


def check_rank(name: str, tensor: Tensor, dims: str) -> None:
    if tensor.dim() != len(dims.split(", ")):
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
    """All tensors on the device of the indices."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != indices.device:
            raise ValueError(f"{name} is on {tensor.device}, but the indices are on {indices.device}: move it there.")


def check_pool(state: Tensor) -> None:
    """A state pool: rows that do not overlap, dense inside, at multiples of 16 bytes."""
    if not state[0].is_contiguous():
        raise ValueError("Every row of state must be contiguous: only the stride between rows is free.")
    stride = state.stride(0) * state.element_size()
    if stride % SLOT_ALIGNMENT or state.data_ptr() % SLOT_ALIGNMENT or state.stride(0) < state[0].numel():
        raise ValueError(
            f"Rows of state must not overlap and must start at multiples of {SLOT_ALIGNMENT} bytes, but they start"
            f" {stride} bytes apart at address {state.data_ptr()}."
        )
