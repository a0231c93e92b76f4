"""The ops around drafts that a device makes of each request's own tokens. They keep to what `api` says of all ops."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import backend
from .checks import check_devices, check_dtype, check_rank, check_shape
from .indices import StateIndices


def draft_from_history(indices: StateIndices, histories: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gives the decode rows of a step the tokens that the host did not know when it planned them, from histories that
    hold all tokens of their requests (prompt lookup, Saxena 2023).

    Of a row with a `late_len` the first of `indices.tokens` becomes the last of its history. Each -1 behind a row's
    first token becomes what followed the row's last tokens where they stood before, or 0: after the latest of the
    longest matches, of 2 to 4 tokens, that a row full of tokens follows; else after the earliest of them.

    Shapes: histories int32 [slots, room], rows dense, by `log_slot`; lengths int64 [slots], 1 or more, and 1 of slot 0.
    Returns int64 [N] each: where a row begins, which `place_decodes` must move it to; by how many tokens that is later
    than its arrays say; how many tokens the rows before it sample at most.
    """
    _check(indices, histories, lengths)
    return backend(histories).draft_from_history(indices, histories, lengths)


def add_to_history(
    indices: StateIndices, first_sample: Tensor, sampled: Tensor, histories: Tensor, lengths: Tensor
) -> Tensor:
    """Adds what the decode rows of a step gave to the histories they were drafted from, once the step has run: of each
    row the samples that agree with its drafts, and one more. Returns int64 [N], how many these are.

    Shapes: first_sample int64 [N], as `draft_from_history` gave it; sampled int64 [S], one for every token of every
    row, of which the decode rows' stand first (below 0 counts as 0). A history must have room for T tokens more: where
    fewer are added, the places behind them may hold anything afterwards.
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
