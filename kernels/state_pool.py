"""Device memory of states, and of KV pages: what a block is made of, and the pool of all blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch

ALIGNMENT = 256
"""Bytes at whose multiples every tensor of a slab begins."""

BLOCKS_AT_ONCE = 64
"""Blocks that `StatePool.finite` copies at a time."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a recurrent layer's state, log or KV page, without the dimension of blocks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    per_token: bool = False  # the first dimension is one of tokens

    @property
    def nbytes(self) -> int:
        """Bytes of one state's share, without alignment."""
        return prod(self.shape) * self.dtype.itemsize


StateLayers = Sequence[Sequence[StateTensor]]


def state_bytes(layers: StateLayers) -> int:
    """Bytes of one state block: all tensors of all layers, each padded to `ALIGNMENT`. Needs no device."""
    return sum(_padded(tensor) for layer in layers for tensor in layer)


class StatePool:
    """Slots for states: one contiguous slab a block, with all layers' tensors at the same offsets in each.

    `layers` holds, for each layer, views [num_blocks + 1, *shape] of its tensors: slot `block` is the state with that
    id. Slot 0 is the null block: it is never written, and never read, so that its contents mean nothing. The memory is
    not cleared, and nothing but the ops of `mambacache.kernels` may read or write it. `slabs` are the same slots as
    uint8 [num_blocks + 1, block_bytes], and `per_token` says where in them tokens have entries of their own: of each
    such tensor the offset, how many tokens it holds, and the bytes of one.

    Args:
        layers: the tensors of one state, layer by layer.
        num_blocks: states that the pool holds, beside the null block.
        device: where it lies.
    """

    def __init__(self, layers: StateLayers, num_blocks: int, device: torch.device | str = "cpu") -> None:
        slot = state_bytes(layers)
        self._lay_out(torch.empty((num_blocks + 1) * slot, dtype=torch.uint8, device=device), layers, slot)

    @classmethod
    def from_tensor(cls, buffer: torch.Tensor, layers: StateLayers, slot_bytes: int | None = None) -> StatePool:
        """Lays a pool into memory that the caller gives, and keeps.

        Args:
            buffer: uint8 [bytes], contiguous, from a multiple of 16 bytes on; as many blocks as fit are made of it.
            layers: the tensors of one state, layer by layer.
            slot_bytes: from one slot to the next, a multiple of 256; None for as many as a state has.

        Raises:
            ValueError: a buffer of another kind, or one that holds no block beside the null block; slots into which no
                state fits.
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
        """Return for each block whether all its values are finite. The null block counts as finite.

        Waits for the device: for blocks of a request whose logits were NaN.
        """
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
