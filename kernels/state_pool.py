"""Hold states and KV pages in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

ALIGNMENT = 256
"""Every tensor of a slab begins at a multiple of this many bytes."""

BLOCKS_AT_ONCE = 64
"""Blocks that `StatePool.finite` checks at a time."""


@dataclass(frozen=True)
class StateTensor:
    """Describe a tensor of a layer's state, log or KV page, without the block dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_token: bool = False  # the first dimension counts tokens

    @property
    def nbytes(self) -> int:
        """Return bytes per block, unpadded."""
        return prod(self.shape) * self.dtype.itemsize


StateLayers = Sequence[Sequence[StateTensor]]


def state_bytes(layers: StateLayers) -> int:
    """Return the bytes of a state block; tensors are padded to `ALIGNMENT`."""
    return sum(_padded(tensor) for layer in layers for tensor in layer)


class StatePool:
    """Hold `num_blocks` states in slots: one contiguous slab a block, with all layers' tensors at fixed offsets.

    `layers` has views [num_blocks + 1, *shape] of each layer's tensors, `slabs` the slots as uint8 [num_blocks + 1,
    block_bytes], `per_token` offset, token count and bytes per token of such tensors. Slot 0, the null block, is never
    used. Memory is not cleared.
    """

    def __init__(self, layers: StateLayers, num_blocks: int, device: torch.device | str = "cpu") -> None:
        slot = state_bytes(layers)
        self._lay_out(torch.empty((num_blocks + 1) * slot, dtype=torch.uint8, device=device), layers, slot)

    @classmethod
    def from_tensor(cls, buffer: torch.Tensor, layers: StateLayers, slot_bytes: int | None = None) -> StatePool:
        """Lay a pool into the caller's memory, and keep it.

        Args:
            buffer: uint8 [bytes], contiguous, aligned to 16 bytes. The pool takes as many blocks as fit.
            slot_bytes: bytes from slot to slot, a multiple of 256; by default a state's.

        Raises ValueError for other buffers, for room for less than two slots, and for slots smaller than a state.
        """
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.data_ptr() % 16:
            raise ValueError("the buffer must be a contiguous uint8 vector that begins at a multiple of 16 bytes")
        slot = state_bytes(layers) if slot_bytes is None else slot_bytes
        if slot < state_bytes(layers) or slot % ALIGNMENT:
            raise ValueError(
                f"slot_bytes is {slot}: give a multiple of {ALIGNMENT} that holds the {state_bytes(layers)} bytes of a "
                "state"
            )
        if buffer.numel() < 2 * slot:
            raise ValueError(f"the buffer has {buffer.numel()} bytes: give at least {2 * slot}, two states")
        pool = cls.__new__(cls)
        pool._lay_out(buffer, layers, slot)
        return pool

    def _lay_out(self, buffer: torch.Tensor, layers: StateLayers, slot_bytes: int) -> None:
        self.block_bytes = state_bytes(layers)
        slots = buffer.numel() // slot_bytes
        self.num_blocks = slots - 1
        self.buffer = buffer
        self.slabs = slabs = buffer[: slots * slot_bytes].view(slots, slot_bytes)[:, : self.block_bytes]
        tensors = [tensor for layer in layers for tensor in layer]
        offsets = list(accumulate(map(_padded, tensors), initial=0))
        views = iter([_view(slabs, tensor, offset) for tensor, offset in zip(tensors, offsets, strict=False)])
        self.layers = [tuple(next(views) for _ in layer) for layer in layers]
        self.per_token = tuple(
            (offset, tensor.shape[0], tensor.nbytes // tensor.shape[0])
            for tensor, offset in zip(tensors, offsets, strict=False)
            if tensor.per_token
        )

    @torch.inference_mode()
    def finite(self, blocks: Sequence[int]) -> list[bool]:
        """Return whether each block is finite (the null block is). Waits for the device."""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.buffer.device)
        tensors = [tensor for layer in self.layers for tensor in layer]
        sound = [
            torch.stack([tensor[some].isfinite().flatten(1).all(1) for tensor in tensors]).all(0)
            for some in ids.split(BLOCKS_AT_ONCE)
        ]
        return (torch.cat(sound) | (ids == 0)).tolist() if blocks else []


def _padded(tensor: StateTensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _view(slabs: torch.Tensor, tensor: StateTensor, offset: int) -> torch.Tensor:
    return slabs[:, offset : offset + tensor.nbytes].view(tensor.dtype).unflatten(1, tensor.shape)
