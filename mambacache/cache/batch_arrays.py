"""The rows of a step as numpy int32 arrays (`StepPlan.arrays`), and the block table they are gathered from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mambacache.cache.sequence import CachedSequence
from mambacache.plan import CHUNK, PLACEHOLDER, SequenceStep, StepPlan

Row = tuple[CachedSequence, SequenceStep]


class BlockTable:
    """KV blocks of all running sequences, one row each, kept up to date as blocks are appended."""

    def __init__(self) -> None:
        self.blocks = np.zeros((1, 1), dtype=np.int32)
        self._free_rows = [0]

    def take_row(self) -> int:
        if not self._free_rows:
            rows = len(self.blocks)
            self.blocks = np.pad(self.blocks, ((0, rows), (0, 0)))
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()

    def give_row(self, row: int) -> None:
        self._free_rows.append(row)

    def append(self, sequence: CachedSequence, block: int) -> None:
        column = len(sequence.kv)
        if column == self.blocks.shape[1]:
            self.blocks = np.pad(self.blocks, ((0, 0), (0, column)))
        self.blocks[sequence.row, column] = block
        sequence.kv.append(block)


def build_plan(rows: Sequence[Row], table: BlockTable | None, block_size: int) -> StepPlan:
    """Orders the rows (decode first) and lays out their arrays; `table` is None where the host keeps the KV."""
    rows = sorted(rows, key=lambda row: row[1].prefill)  # stable: arrival order within each kind
    num_decodes = sum(not step.prefill for _, step in rows)
    decode, prefill = rows[:num_decodes], rows[num_decodes:]
    width = max((step.num_tokens for _, step in decode), default=1)
    arrays = _decode_arrays([step for _, step in decode], width)
    arrays |= _prefill_arrays([step for _, step in prefill], num_decodes * width)

    slots = _decode_slots(decode, width)
    starts = arrays["query_start_loc"]
    num_tokens = int(starts[-1])
    tokens = np.zeros(num_tokens, dtype=np.int32)
    positions = np.zeros(num_tokens, dtype=np.int32)
    owners = np.full(num_tokens, -1, dtype=np.int32)  # the row that a token belongs to; -1 for padding
    tokens[slots] = [t for sequence, step in decode for t in _step_tokens(sequence, step)]
    positions[slots] = _positions(decode)
    owners[slots] = np.repeat(np.arange(num_decodes), [step.num_tokens for _, step in decode])
    for index, (sequence, step) in enumerate(prefill):
        flat = slice(starts[index], starts[index + 1])
        tokens[flat] = sequence.tokens[step.start : step.start + step.num_tokens]
        positions[flat] = np.arange(step.start, step.start + step.num_tokens)
        owners[flat] = num_decodes + index
    arrays |= {"tokens": tokens, "positions": positions}
    if table is not None:
        arrays |= _kv_arrays(rows, table, block_size, positions, owners)

    wanted = [_logits(step, int(end)) for (_, step), end in zip(prefill, starts[1:], strict=True)]
    arrays["logits_index"] = np.concatenate([slots, *wanted]).astype(np.int32)
    return StepPlan(tuple(step for _, step in rows), num_decodes, width, arrays)


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _decode_arrays(steps: Sequence[SequenceStep], width: int) -> dict[str, np.ndarray]:
    dst = _int32([block for step in steps for block in step.dst + (0,) * (width - step.num_tokens)])
    return {
        "decode_src": _int32([step.src for step in steps]),
        "decode_dst": dst.reshape(len(steps), width),
        "decode_conv_src": _int32([step.conv_src for step in steps]),
        "decode_conv_offset": _int32([step.conv_offset for step in steps]),
        "decode_boundary_index": _int32([step.boundary_index for step in steps]),
    }


def _prefill_arrays(steps: Sequence[SequenceStep], first: int) -> dict[str, np.ndarray]:
    chunk_seq, chunk_start, chunk_dst = [], [], []
    seq_chunk_start, query_start_loc = [0], [first]
    for index, step in enumerate(steps):
        end = step.start + step.num_tokens
        cuts = [step.start, *range(step.start // CHUNK * CHUNK + CHUNK, end, CHUNK)]
        chunk_seq += [index] * len(cuts)
        chunk_start += [query_start_loc[-1] + cut - step.start for cut in cuts]
        chunk_dst += [step.checkpoints.get(cut, 0) for cut in cuts[1:]] + [step.dst[0]]
        seq_chunk_start.append(len(chunk_seq))
        query_start_loc.append(query_start_loc[-1] + step.num_tokens)
    return {
        "query_start_loc": _int32(query_start_loc),
        "context_len": _int32([step.start for step in steps]),
        "src": _int32([step.src for step in steps]),
        "conv_src": _int32([step.conv_src for step in steps]),
        "conv_offset": _int32([step.conv_offset for step in steps]),
        "chunk_seq": _int32(chunk_seq),
        "chunk_start": _int32(chunk_start),
        "chunk_dst": _int32(chunk_dst),
        "seq_chunk_start": _int32(seq_chunk_start),
    }


def _step_tokens(sequence: CachedSequence, step: SequenceStep) -> tuple[int, ...]:
    known = step.start < len(sequence.tokens)
    return (sequence.tokens[step.start] if known else PLACEHOLDER, *step.drafts)


def _decode_slots(decode: Sequence[Row], width: int) -> np.ndarray:
    """Offsets in the flat batch of the decode tokens that are not padding."""
    counts = _int32([step.num_tokens for _, step in decode])
    return np.flatnonzero(np.arange(width) < counts[:, None])


def _positions(decode: Sequence[Row]) -> list[int]:
    return [p for _, step in decode for p in range(step.start, step.start + step.num_tokens)]


def _logits(step: SequenceStep, end: int) -> range:
    """Offsets whose logits a prefill row that ends at `end` of the flat batch wants."""
    return range(end - step.num_tokens if step.prompt_logits else end - step.samples, end)


def _kv_arrays(
    rows: Sequence[Row], table: BlockTable, block_size: int, positions: np.ndarray, owners: np.ndarray
) -> dict[str, np.ndarray]:
    columns = max((len(sequence.kv) for sequence, _ in rows), default=0)
    block_table = table.blocks[[sequence.row for sequence, _ in rows], :columns]
    shared = _int32([sequence.kv_shared * block_size for sequence, _ in rows])
    kv_slot = block_table[owners, positions // block_size] * block_size + positions % block_size
    kv_slot[(owners < 0) | (positions < shared[owners])] = -1  # padding, or the page holds it already
    return {
        "kv_slot": kv_slot,
        "block_table": block_table,
        "kv_len": _int32([step.start + step.num_tokens for _, step in rows]),
    }
