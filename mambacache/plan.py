"""What a scheduler hands to a runner: pure data, host integers and numpy int32 arrays.

A `SequenceStep` is one row of a step, a `StepPlan` the whole mixed batch: decode rows first, then prefill rows. Every
src, dst and checkpoint block in it was chosen by the state planner; whoever reads a plan only follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

CHUNK = 64
"""Tokens that a prefill kernel handles at once, anchored at absolute positions."""

NULL_BLOCK = 0
"""As src: a fresh state (zeros, never read). As dst: do not store."""

PLACEHOLDER = -1
"""A token that the host does not know yet: it is being sampled by a step that was issued before."""


@dataclass(slots=True)
class SequenceStep:
    """One sequence's part of a step.

    It runs the tokens at positions `start` to `start + num_tokens`. A prefill row has one dst, a decode row one dst per
    token (its last known token, then `drafts`). `src` holds the recurrent state before the row, `conv_src` the conv
    window, which begins at row `conv_offset` of that block; the two differ only after a step with drafts.
    """

    request_id: str
    start: int
    num_tokens: int
    prefill: bool
    samples: bool  # whether the row's last token is followed by an unknown one, so that its logits are wanted
    src: int
    conv_src: int
    conv_offset: int
    dst: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    checkpoints: dict[int, int] = field(default_factory=dict)  # position -> block, beside what stands in dst
    boundary_index: int = -1  # the token, past the first, whose dst also receives its own conv window
    prompt_logits: bool = False  # a prefill row whose every token's logits are wanted
    epoch: int = 0  # tells a row of a request that was preempted or freed meanwhile from a live one


@dataclass(slots=True)
class StepPlan:
    """One forward pass over a mixed batch.

    `arrays` holds numpy int32 arrays. N decode rows of T = `tokens_per_decode` tokens come first in the flat batch of
    F tokens, padded with null tokens where a row has fewer; then P prefill rows, back to back, cut into C chunks at
    absolute multiples of 64:

    - `decode_src`, `decode_conv_src`, `decode_conv_offset`, `decode_boundary_index` [N]; `decode_dst` [N, T]
    - `query_start_loc` [P + 1] (offsets in the flat batch, so the first is N * T); `context_len`, `src`, `conv_src`,
      `conv_offset` [P]
    - `chunk_seq`, `chunk_start` (offset in the flat batch), `chunk_dst` [C]; `seq_chunk_start` [P + 1]
    - `tokens`, `positions` [F]; with a KV pool also `kv_slot` [F] (block * block_size + offset, -1: do not write),
      `block_table` [N + P, blocks] and `kv_len` [N + P] (tokens readable, this step's included)
    - `logits_index` [L]: offsets in the flat batch of the tokens whose logits are wanted, row by row
    """

    steps: tuple[SequenceStep, ...]
    num_decodes: int
    tokens_per_decode: int
    arrays: dict[str, np.ndarray]
    kv_copies: tuple[tuple[int, int], ...] = ()  # (from, to): KV pages to copy before the pass, once for each fork
