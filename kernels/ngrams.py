"""Define the ops that draft on the device, with the conventions of `api`."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import backend
from .checks import check_devices, check_dtype, check_rank, check_shape
from .indices import StateIndices


def draft_from_history(indices: StateIndices, histories: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fill in the decode rows' unknown tokens from histories (prompt lookup, Saxena 2023).

    In a row with a `late_len` the first of `indices.tokens` becomes the history's last token. Each later -1 becomes the
    token that followed an earlier match of the history's last 2 to 4 tokens, or 0. The longest match wins, then the
    latest match that T - 1 tokens follow, then the earliest.

    Shapes: histories int32 [slots, room], by `log_slot`; lengths int64 [slots], at least 1, and 1 for slot 0. Returns
    int64 [N] each: starts for `place_decodes`; tokens by which they are late; most samples of earlier rows.
    """
    _check(indices, histories, lengths)
    return backend(histories).draft_from_history(indices, histories, lengths)


def add_to_history(
    indices: StateIndices, first_sample: Tensor, sampled: Tensor, histories: Tensor, lengths: Tensor
) -> Tensor:
    """Append accepted tokens to histories: the samples that agree with a row's drafts, and one more.

    Shapes: first_sample int64 [N] from `draft_from_history`; sampled int64 [S], one per token of every row, decode rows
    first (below 0 counts as 0). Returns counts, int64 [N]. Histories need room for T more tokens.
    """
    _check(indices, histories, lengths)
    check_shape("first_sample", first_sample, indices.num_decodes)
    check_dtype("first_sample", first_sample, torch.int64)
    check_rank("sampled", sampled, "S")
    check_dtype("sampled", sampled, torch.int64)
    check_devices(indices, first_sample=first_sample, sampled=sampled)
    if not (first_sample.is_contiguous() and sampled.is_contiguous()):
        raise ValueError("first_sample and sampled must be contiguous: call contiguous() on them.")
    return backend(histories).add_to_history(indices, first_sample, sampled, histories, lengths)


def _check(indices: StateIndices, histories: Tensor, lengths: Tensor) -> None:
    check_rank("histories", histories, "slots, room")
    check_dtype("histories", histories, torch.int32)
    check_shape("lengths", lengths, len(histories))
    check_dtype("lengths", lengths, torch.int64)
    check_devices(indices, histories=histories, lengths=lengths)
    if histories.stride(1) != 1 or not lengths.is_contiguous():
        raise ValueError("Rows of histories, and lengths, must be contiguous: call contiguous() on them.")
