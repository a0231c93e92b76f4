"""Implement `place_decodes`."""

from __future__ import annotations

import torch
from torch import Tensor

from mambacache.plan import FOLD, after_fold

from ..indices import StateIndices
from .states import depths


def place_decodes(indices: StateIndices, starts: Tensor, block_size: int | None) -> None:
    """See `mambacache.kernels.place_decodes`."""
    late, starts = indices.late_len > 0, starts.to(torch.int32)
    end = torch.where(indices.decode_len > 0, starts % FOLD, indices.log_end)
    passed = (late & (end < indices.log_end)).int()
    src, dst, begin = after_fold(passed, indices.decode_src, indices.decode_dst, indices.log_start, 0)
    length = torch.where(late, torch.minimum(indices.late_len, FOLD - end), indices.decode_len)
    dst = torch.where(late & (end + length < FOLD), 0, dst)
    changed = {"decode_src": src, "decode_dst": dst, "log_start": begin, "log_end": end, "decode_len": length}
    for name, values in changed.items():
        getattr(indices, name).copy_(values)

    rows = ((dst != 0) & (length > 0)).nonzero().squeeze(1)
    fields = torch.stack([src, dst, indices.log_slot, begin, end + length], dim=1)[rows].flatten()
    indices.folds[0] = len(rows)
    indices.folds[1 : 1 + len(fields)] = fields
    token = torch.arange(indices.tokens_per_decode, device=indices.device)
    real, positions = token < length[:, None], starts[:, None] + depths(indices)
    if hasattr(indices, "positions"):
        indices.positions[: real.numel()] = torch.where(real, positions, 0).flatten()
    if block_size is None:
        return
    positions = starts[:, None] + token
    pages = indices.block_table_start[: len(starts), None] + positions // block_size
    slots = indices.block_table[torch.where(real, pages, 0)] * block_size + positions % block_size
    indices.kv_slot[: real.numel()] = torch.where(real, slots, -1).flatten()
    indices.kv_len[: len(starts)] = torch.where(length > 0, starts + length, 0)
