"""What a scheduler hands to a runner: pure data, host integers and numpy int32 arrays.

A `SequenceStep` is one row of a step, a `StepPlan` the whole mixed batch: decode rows first, then prefill rows. Every
src, dst and checkpoint block in it was chosen by the cache; whoever reads a plan only follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

CHUNK = 64
"""Tokens that a prefill kernel handles at once, anchored at absolute positions."""

NULL_BLOCK = 0
"""As src: a fresh state (zeros, never read). As dst: do not store."""

PLACEHOLDER = -1
"""A token that the host does not know yet: it is being sampled by a step that was issued before."""

NO_CHECKPOINTS: Mapping[int, int] = MappingProxyType({})


class SequenceStep(NamedTuple):
    """One sequence's part of a step.

    It runs the tokens at positions `start` to `start + num_tokens`. A prefill row has one dst, a decode row one dst per
    token (its last known token, then `drafts`). `src` holds the recurrent state before the row, `conv_src` the conv
    window, which begins at row `conv_offset` of that block; the two differ only after a step with drafts.
    """

    request_id: str
    life: int  # of the request, from one admission to the next: tells this row from those of another life or namesake
    row: int  # a number that no other row of the cache has
    start: int
    num_tokens: int
    prefill: bool  # which kernels run it
    samples: bool  # whether the row's last token is followed by an unknown one, so that its logits are wanted
    src: int
    conv_src: int
    conv_offset: int
    dst: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    checkpoints: Mapping[int, int] = NO_CHECKPOINTS  # position -> block, beside what stands in dst
    boundary_index: int = -1  # the token, past the first, whose dst also receives its own conv window
    prompt_logits: bool = False  # a prefill row whose every token's logits are wanted


@dataclass(slots=True)
class StepPlan:
    """One forward pass over a mixed batch.

    `arrays` holds numpy int32 arrays. N decode rows of T = `tokens_per_decode` tokens come first in the flat batch of
    F tokens, padded with null tokens where a row has fewer; then P prefill rows, back to back, cut into C chunks at
    absolute multiples of 64:

    - `decode_src`, `decode_conv_src`, `decode_conv_offset`, `decode_boundary_index` and `decode_len` (the tokens of a
      row that are not padding) [N]; `decode_dst` [N, T]
    - `query_start_loc` [P + 1] (offsets in the flat batch, so the first is N * T); `context_len`, `src`, `conv_src`,
      `conv_offset` [P]
    - `chunk_seq`, `chunk_start` (offset in the flat batch), `chunk_dst` [C]; `seq_chunk_start` [P + 1]
    - `tokens`, `positions` [F]; with a KV pool also `kv_slot` [F] (block * block_size + offset, -1: do not write),
      `block_table` (the pages of all rows, one row after the other), `block_table_start` [N + P + 1] (where each row's
      pages begin) and `kv_len` [N + P] (tokens readable, this step's included)
    - `logits_index` [L]: offsets in the flat batch of the tokens whose logits are wanted, row by row
    """

    steps: tuple[SequenceStep, ...]
    num_decodes: int
    tokens_per_decode: int
    arrays: dict[str, np.ndarray]
    kv_copies: tuple[tuple[int, int], ...] = ()  # (from, to): KV pages to copy before the pass, once for each fork


def layout(rows: Sequence[SequenceStep], decode_rows: int) -> dict[str, np.ndarray]:
    """The arrays of states and chunks for rows that stand in this very order: without tokens and KV.

    Args:
        decode_rows: how many rows, from the first on, run in the decode kernels.

    Raises:
        ValueError: rows for the decode kernels do not come first, or their number is another one.
    """
    decode, prefill = rows[:decode_rows], rows[decode_rows:]
    if any(row.prefill for row in decode) or not all(row.prefill for row in prefill):
        raise ValueError(
            f"decode_rows is {decode_rows}: let all rows for the decode kernels come first, and give their number "
            "(allocate with decode=True what a prompt's last token shall run there)"
        )
    width = max((row.num_tokens for row in decode), default=1)
    return _decode_arrays(decode, width) | _prefill_arrays(prefill, decode_rows * width)


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _decode_arrays(rows: Sequence[SequenceStep], width: int) -> dict[str, np.ndarray]:
    dst = _int32([block for row in rows for block in row.dst + (0,) * (width - row.num_tokens)])
    return {
        "decode_src": _int32([row.src for row in rows]),
        "decode_dst": dst.reshape(len(rows), width),
        "decode_conv_src": _int32([row.conv_src for row in rows]),
        "decode_conv_offset": _int32([row.conv_offset for row in rows]),
        "decode_boundary_index": _int32([row.boundary_index for row in rows]),
        "decode_len": _int32([row.num_tokens for row in rows]),
    }


def _prefill_arrays(rows: Sequence[SequenceStep], first: int) -> dict[str, np.ndarray]:
    chunk_start: list[int] = []
    chunk_dst: list[int] = []
    seq_chunk_start, query_start_loc = [0], [first]
    for row in rows:
        start, offset = row.start, query_start_loc[-1]
        end = start + row.num_tokens
        cut = start // CHUNK * CHUNK + CHUNK  # the first one inside the row, if it is before the end
        chunk_start.append(offset)
        chunk_start += range(offset + cut - start, offset + end - start, CHUNK)
        if row.checkpoints:
            chunk_dst += [row.checkpoints.get(position, 0) for position in range(cut, end, CHUNK)]
        else:
            chunk_dst += [0] * len(range(cut, end, CHUNK))
        chunk_dst.append(row.dst[0])
        seq_chunk_start.append(len(chunk_start))
        query_start_loc.append(offset + row.num_tokens)
    chunks = _int32(seq_chunk_start)
    return {
        "query_start_loc": _int32(query_start_loc),
        "context_len": _int32([row.start for row in rows]),
        "src": _int32([row.src for row in rows]),
        "conv_src": _int32([row.conv_src for row in rows]),
        "conv_offset": _int32([row.conv_offset for row in rows]),
        "chunk_seq": np.repeat(np.arange(len(rows), dtype=np.int32), np.diff(chunks)),
        "chunk_start": _int32(chunk_start),
        "chunk_dst": _int32(chunk_dst),
        "seq_chunk_start": chunks,
    }
