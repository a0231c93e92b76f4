"""Define the plan of a step: host integers and int32 arrays, with blocks that the cache chose."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

CHUNK = 64
"""Tokens in a chunk of prefill. Chunks begin at absolute multiples of CHUNK."""

FOLD = 16
"""Entries of a token log, folded into a dst at absolute multiples of FOLD. No decode row crosses these."""

MAX_TOKENS_PER_DECODE = 8
MAX_DRAFT_TOKENS = MAX_TOKENS_PER_DECODE - 1  # beside a known token

NULL_BLOCK = 0
"""As src: a fresh state (zeros, never read). As dst: store nothing."""

PLACEHOLDER = -1
"""Token that an earlier step samples, unknown to the host."""

NOT_FINITE = -2
"""Token for NaN or infinite logits."""

DECODE_ARRAYS = "decode_src", "decode_dst", "log_slot", "log_start", "log_end", "decode_len", "late_len"
"""Arrays of decode rows; zeros in padding."""

NO_CHECKPOINTS: Mapping[int, int] = MappingProxyType({})


class Guess(NamedTuple):
    """Holds a row's drafts; `parents` as in `SequenceStep`."""

    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def cut(self, count: int) -> Guess:
        return Guess(self.drafts[:count], self.parents[:count]) if self.drafts else self


NO_GUESS = Guess()


class SequenceStep(NamedTuple):
    """Describes a batch row: the tokens at positions `start` to `start + num_tokens`.

    A decode row runs a known token, then `drafts`. `src` holds the state before the row, or before entry `log_start` of
    its log. `dst` receives the state after the row, or is null if the row only adds to its log.

    A tree of drafts is in preorder, and `parents` are the places in the row that drafts follow; place 0 is the known
    token. After a tree, `keep_paths` must first move the entries at positions `kept` to just before `start`.
    """

    request_id: str
    residency: int  # its number
    row: int  # unique in the cache
    start: int
    num_tokens: int
    prefill: bool
    samples: bool  # wants logits of its last token
    src: int
    dst: int
    log_slot: int = 0
    log_start: int = 0
    drafts: tuple[int, ...] = ()
    checkpoints: Mapping[int, int] = NO_CHECKPOINTS  # position -> block, beside dst
    prompt_logits: bool = False  # wants all logits of a prefill row
    unplaced_by: int = 0  # tokens by which it may start later
    parents: tuple[int, ...] = ()  # empty without branches
    kept: tuple[int, ...] = ()

    def draft_after(self, place: int, token: int) -> int:
        """Return the place of the draft `token` after `place`, or 0; placeholders match any token."""
        if not self.parents:
            return place + 1 if place < len(self.drafts) and self.drafts[place] in (token, PLACEHOLDER) else 0
        for i, (draft, parent) in enumerate(zip(self.drafts, self.parents, strict=True), 1):
            if parent == place and draft == token:
                return i
        return 0

    def followed(self, tokens: Sequence[int]) -> list[int]:
        """Return place 0, and the places of drafts that agree with `tokens`."""
        path = [0]
        for token in tokens:
            place = self.draft_after(path[-1], token)
            if not place:
                break
            path.append(place)
        return path

    def depths(self) -> Sequence[int]:
        """Count the tokens before each token on its path."""
        if not self.parents:
            return range(self.num_tokens)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths


class PageTables(NamedTuple):
    """Lists the KV pages of each row."""

    pages: Sequence[array[int]]
    num_shared: Sequence[int]  # leading pages that others wrote
    copied: Sequence[int]  # page to copy to the first other page; 0 for none


class BlockFile(NamedTuple):
    """Names a host slot to write to a file, or to fill from it."""

    kind: str  # "state" or "kv"
    slot: int
    block_hash: bytes
    exact: bool  # same bits as a cold prefill
    born: int  # the writing issue; 0: an earlier process
    writer: int = 0  # request number; 0: an earlier process
    if_room: bool = False  # delete no other file


class Transfer(NamedTuple):
    """Lists copies (device block, host slot), or between host slots and `files`."""

    number: int
    to_host: bool
    states: tuple[tuple[int, int], ...]
    pages: tuple[tuple[int, int], ...]
    files: tuple[BlockFile, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """Describes a forward pass over a flat batch of F tokens: N decode rows, then P prefill rows.

    Decode rows are padded to T = `tokens_per_decode` tokens. Prefill rows are cut into C chunks. `arrays` are int32,
    with offsets in the flat batch:

    - `decode_src`, `decode_dst`, `log_slot`, `log_start`, `log_end` (entry of the first token) [N]
    - `decode_len` [N]: tokens without padding
    - `late_len` [N]: tokens of an unplaced row if its log has room; else 0
    - `ancestors` [N * T], with trees: bits of the tokens on a token's path, itself included
    - `query_start_loc` [P + 1] (offsets), `context_len`, `src` [P]
    - `chunk_seq`, `chunk_start` (offset), `chunk_dst` [C], `seq_chunk_start` [P + 1]
    - `tokens`, `positions` [F]
    - `logits_index` [L]: offsets of the wanted logits
    - with a KV pool: `kv_slot` [F] (block * block_size + offset; -1: do not write), `block_table` (pages by row),
      `block_table_start` [N + P + 1], `kv_len` [N + P] (tokens, with this step's)

    `log_paths`, `kv_paths`: moves of `keep_paths` before the pass, int32 [R, 9] or None.
    """

    steps: tuple[SequenceStep, ...]
    num_decodes: int
    tokens_per_decode: int
    arrays: dict[str, np.ndarray]
    kv_copies: tuple[tuple[int, int], ...] = ()  # (from, to): KV pages to copy first
    log_paths: np.ndarray | None = None
    kv_paths: np.ndarray | None = None


def layout(rows: Sequence[SequenceStep], decode_rows: int, width: int | None = None) -> dict[str, np.ndarray]:
    """Lay out the arrays of states and chunks, or raise ValueError unless `decode_rows` leading rows decode.

    Args:
        width: tokens of a decode row; None for the longest.
    """
    decode, prefill = rows[:decode_rows], rows[decode_rows:]
    if any([row.prefill for row in decode]) or not all([row.prefill for row in prefill]):
        raise ValueError(
            f"decode_rows is {decode_rows}: let all rows for the decode kernels come first, and give their number "
            "(allocate with decode=True what a prompt's last token shall run there)"
        )
    if width is None:
        width = max([row.num_tokens for row in decode], default=1)
    return _decode_arrays(decode, width) | _prefill_arrays(prefill, decode_rows * width)


def pad(plan: StepPlan, rows: int, width: int) -> StepPlan:
    """Pad decode rows to `rows` of `width` tokens, which read and write nothing; all logits are wanted.

    `rows` and `width` fix all shapes except `block_table`, the last.
    """
    old, real = plan.arrays, (plan.num_decodes, plan.tokens_per_decode)
    tokens = {"tokens": 0, "positions": 0, "kv_slot": -1}
    arrays = {name: _padded(old[name], (rows,), 0) for name in DECODE_ARRAYS}
    arrays |= {
        name: _padded(old[name].reshape(real), (rows, width), padding).ravel()
        for name, padding in (tokens | {"ancestors": 0}).items()
        if name in old
    }
    arrays["logits_index"] = np.arange(rows * width, dtype=np.int32)
    arrays["query_start_loc"] = np.array([rows * width], np.int32)
    if "block_table" in old:
        arrays["kv_len"] = _padded(old["kv_len"], (rows,), 0)
        arrays["block_table_start"] = _padded(old["block_table_start"], (rows + 1,), old["block_table_start"][-1])
        arrays["block_table"] = old["block_table"]
    return replace(plan, tokens_per_decode=width, arrays=arrays)


def _padded(array: np.ndarray, shape: tuple[int, ...], padding: int) -> np.ndarray:
    if array.shape == shape:
        return array
    larger = np.full(shape, padding, np.int32)
    larger[tuple(map(slice, array.shape))] = array
    return larger


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _decode_arrays(rows: Sequence[SequenceStep], width: int) -> dict[str, np.ndarray]:
    numbers = np.fromiter(chain.from_iterable(map(_decode_numbers, rows)), np.int32, 7 * len(rows))
    arrays = decode_arrays(numbers.reshape(-1, 7))
    if any([row.parents for row in rows]):
        arrays["ancestors"] = np.concatenate([_ancestors(row, width) for row in rows])
    return arrays


_decode_numbers = attrgetter("start", "num_tokens", "src", "dst", "log_slot", "log_start", "unplaced_by")


def after_fold(folded: Any, src: Any, dst: Any, log_start: Any, log_end: Any) -> tuple[Any, Any, Any]:
    """Return src, dst and log_start of the next rows: after a fold they read the stored state.

    Args:
        folded: 1 after a fold, else 0. All arguments: int, or int32 array or tensor [N].
        log_end: log entries after the row.
    """
    return src + folded * (dst - src), dst - folded * dst, log_start + folded * (log_end % FOLD - log_start)


def decode_arrays(numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Return `DECODE_ARRAYS` from int32 [N, 7]: start, num_tokens, src, dst, log_slot, log_start, unplaced_by."""
    start, num_tokens, src, dst, log_slot, log_start, unplaced_by = numbers.T.copy()
    log_end, late_len = start % FOLD, num_tokens * (unplaced_by > 0)
    columns = src, dst, log_slot, log_start, log_end, np.minimum(num_tokens, FOLD - log_end), late_len
    return dict(zip(DECODE_ARRAYS, columns, strict=True))


def _ancestors(row: SequenceStep, width: int) -> np.ndarray:
    masks = [1]
    for place, parent in enumerate(row.parents or range(width - 1), 1):
        masks.append(masks[parent] | 1 << place)
    return _int32(masks + [0] * (width - len(masks)))


def _path_rows(rows: Sequence[tuple[SequenceStep, int]], size: int) -> np.ndarray | None:
    """Return moves of `keep_paths`; position p is at p % `size` in a slot."""
    paths = []
    for row, slot in rows:
        places = [position % size for position in row.kept]
        first = (row.start - len(places)) % size
        paths.append([slot, first, *places, *[-1] * (MAX_DRAFT_TOKENS - len(places))])
    return np.array(paths, dtype=np.int32) if paths else None


def _prefill_arrays(rows: Sequence[SequenceStep], first: int) -> dict[str, np.ndarray]:
    chunk_start: list[int] = []
    chunk_dst: list[int] = []
    seq_chunk_start, query_start_loc = [0], [first]
    for row in rows:
        start, offset = row.start, query_start_loc[-1]
        end = start + row.num_tokens
        cut = start // CHUNK * CHUNK + CHUNK  # may be beyond the end
        chunk_start.append(offset)
        chunk_start += range(offset + cut - start, offset + end - start, CHUNK)
        if row.checkpoints:
            chunk_dst += [row.checkpoints.get(position, 0) for position in range(cut, end, CHUNK)]
        else:
            chunk_dst += [0] * len(range(cut, end, CHUNK))
        chunk_dst.append(row.dst)
        seq_chunk_start.append(len(chunk_start))
        query_start_loc.append(offset + row.num_tokens)
    chunks = _int32(seq_chunk_start)
    return {
        "query_start_loc": _int32(query_start_loc),
        "context_len": _int32([row.start for row in rows]),
        "src": _int32([row.src for row in rows]),
        "chunk_seq": np.repeat(np.arange(len(rows), dtype=np.int32), np.diff(chunks)),
        "chunk_start": _int32(chunk_start),
        "chunk_dst": _int32(chunk_dst),
        "seq_chunk_start": chunks,
    }


def build_plan(
    steps: Sequence[SequenceStep], tokens: Sequence[array[int]], tables: PageTables | None, block_size: int
) -> StepPlan:
    """Lay out the plan of ordered rows, decode rows first.

    Args:
        tokens: known tokens of each row's request.
        tables: None without KV pages.
    """
    num_decodes = sum([not step.prefill for step in steps])
    decode, prefill = steps[:num_decodes], steps[num_decodes:]
    width = max([step.num_tokens for step in decode], default=1)
    arrays = layout(steps, num_decodes, width)
    most = np.maximum(arrays["decode_len"], arrays["late_len"])
    real = np.arange(width) < most[:, None]  # not padding
    starts = _int32([step.start for step in decode])
    depths = np.arange(width)
    if "ancestors" in arrays:
        depths = np.bitwise_count(arrays["ancestors"]).astype(np.int32).reshape(num_decodes, width) - 1
    positions = np.where(real, starts[:, None] + depths, 0)
    ids = np.zeros((num_decodes, width), np.int32)
    ids[:, 0] = [
        known[step.start] if step.start < len(known) else PLACEHOLDER
        for step, known in zip(decode, tokens, strict=False)
    ]
    for i, step in enumerate(decode if width > 1 else ()):
        ids[i, 1 : step.num_tokens] = step.drafts
    prompts, spans = array("i"), [positions.ravel()]
    for step, known in zip(prefill, tokens[num_decodes:], strict=True):
        end = step.start + step.num_tokens
        prompts += known[step.start : end]
        spans.append(np.arange(step.start, end))
    arrays |= {"tokens": _join([ids.ravel(), _int32(prompts)]), "positions": _join(spans)}
    copies: list[tuple[int, int]] = []
    if tables is not None:
        places = np.where(real, starts[:, None] + np.arange(width), -1)
        arrays |= _kv_arrays(steps, tables, block_size, places)
        copies = [(page, own[shared]) for own, shared, page in zip(*tables, strict=True) if page]
    moved = [i for i, step in enumerate(decode) if step.kept]
    log_paths = _path_rows([(decode[i], decode[i].log_slot) for i in moved], FOLD)
    kv_paths = None
    if tables is not None:
        pages = [(decode[i], tables.pages[i][(decode[i].start - 1) // block_size]) for i in moved]
        kv_paths = _path_rows(pages, block_size)
    ends = arrays["query_start_loc"].tolist()[1:]
    wanted = [i for step, end in zip(prefill, ends, strict=True) for i in _wanted(step, end)]
    arrays["logits_index"] = _join([np.flatnonzero(real), _int32(wanted)])
    return StepPlan(tuple(steps), num_decodes, width, arrays, tuple(copies), log_paths, kv_paths)


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, dtype=np.int32)


def _wanted(row: SequenceStep, end: int) -> range:
    return range(end - row.num_tokens if row.prompt_logits else end - row.samples, end)


def _kv_arrays(
    steps: Sequence[SequenceStep], tables: PageTables, size: int, positions: np.ndarray
) -> dict[str, np.ndarray]:
    """Lay out the KV arrays; `positions` [N, T]: -1 for padding."""
    num_decodes = len(positions)
    pages = np.frombuffer(bytearray().join(tables.pages), np.int32)
    starts = np.cumsum([0, *map(len, tables.pages)], dtype=np.int32)
    block, offset = np.divmod(positions, size)
    held = block < np.array(tables.num_shared[:num_decodes], np.int64)[:, None]  # others wrote these slots
    slots = [np.where(held | (positions < 0), -1, pages[starts[:num_decodes, None] + block] * size + offset).ravel()]
    offsets = np.arange(size, dtype=np.int32)
    for i, step in enumerate(steps[num_decodes:], num_decodes):
        start, end = step.start, step.start + step.num_tokens
        written = pages[starts[i] + start // size : starts[i] - (-end // size)]
        slot = (written[:, None] * size + offsets).ravel()[start % size : start % size + step.num_tokens]
        slot[: max(tables.num_shared[i] * size - start, 0)] = -1  # the page holds it already
        slots.append(slot)
    return {
        "kv_slot": _join(slots),
        "block_table": pages,
        "block_table_start": starts,
        "kv_len": _int32([step.start + step.num_tokens for step in steps]),
    }
