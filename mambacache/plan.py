"""What a scheduler hands to a runner: pure data, host integers and numpy int32 arrays, and how the arrays are laid out.

A `SequenceStep` is one row of a step, a `StepPlan` the whole mixed batch: decode rows first, then prefill rows. A
`Transfer` is what is to be copied between device, host and files beside the steps. Every block in them was chosen by
the cache; whoever reads a plan only follows it.
"""

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
"""Tokens that a prefill kernel handles at once, anchored at absolute positions."""

FOLD = 16
"""Entries of a token log. No decode row crosses an absolute multiple of FOLD: there its log is folded into a dst."""

MAX_TOKENS_PER_DECODE = 8
MAX_DRAFT_TOKENS = MAX_TOKENS_PER_DECODE - 1
"""The most drafts of a row, which has a known token before them."""

NULL_BLOCK = 0
"""As src: a fresh state (zeros, never read). As dst: do not store."""

PLACEHOLDER = -1
"""A token that the host does not know yet: it is being sampled by a step that was issued before."""

NOT_FINITE = -2
"""The token that a runner gives after logits that are NaN or infinite."""

DECODE_ARRAYS = "decode_src", "decode_dst", "log_slot", "log_start", "log_end", "decode_len", "late_len"
"""Arrays of a decode row; a row of padding has zeros in them."""

NO_CHECKPOINTS: Mapping[int, int] = MappingProxyType({})


class Guess(NamedTuple):
    """Drafts of one row; `parents` as of `SequenceStep`."""

    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def cut(self, count: int) -> Guess:
        """The first so many."""
        return Guess(self.drafts[:count], self.parents[:count]) if self.drafts else self


NO_GUESS = Guess()


class SequenceStep(NamedTuple):
    """One sequence's part of a step.

    It runs the tokens at positions `start` to `start + num_tokens`, a decode row a known token and then `drafts`. `src`
    holds the state before the row, or, where it goes on from a log, before the entry `log_start` of that; `dst` will
    hold the one after the row, and is null where a decode row adds to its log alone.

    Drafts may form a tree, in preorder: then `parents` says which token of the row, counted from the known one on, each
    of them comes after. In logs and KV pages the tokens of a tree have the places of a row without branches. After a
    tree's row was accepted, `keep_paths` must move its path before the next row runs: from the positions `kept` to the
    positions right before `start`.
    """

    request_id: str
    residency: int  # number of the time from one admission of the request to the next
    row: int  # a number that no other row of the cache has
    start: int
    num_tokens: int
    prefill: bool  # which kernels run it
    samples: bool  # whether the row's last token is followed by an unknown one, so that its logits are wanted
    src: int
    dst: int
    log_slot: int = 0
    log_start: int = 0
    drafts: tuple[int, ...] = ()
    checkpoints: Mapping[int, int] = NO_CHECKPOINTS  # position -> block, for states beside the state in dst
    prompt_logits: bool = False  # whether the logits of all tokens of a prefill row are wanted
    late: int = 0  # the most tokens by which a decode row may begin later, if drafts before it are accepted
    parents: tuple[int, ...] = ()  # empty where each draft comes after the one before it
    kept: tuple[int, ...] = ()

    def draft_after(self, place: int, token: int) -> int:
        """The place in the row of the draft that is this token and comes after the one at a place; 0 if none does. A
        placeholder is any token."""
        if not self.parents:
            return place + 1 if place < len(self.drafts) and self.drafts[place] in (token, PLACEHOLDER) else 0
        for i, (draft, parent) in enumerate(zip(self.drafts, self.parents, strict=True), 1):
            if parent == place and draft == token:
                return i
        return 0

    def followed(self, tokens: Sequence[int]) -> list[int]:
        """The places in the row of its first token and of the drafts that these tokens behind it agree with."""
        path = [0]
        for token in tokens:
            place = self.draft_after(path[-1], token)
            if not place:
                break
            path.append(place)
        return path

    def depths(self) -> Sequence[int]:
        """By how many tokens of the row each of a decode row's is preceded."""
        if not self.parents:
            return range(self.num_tokens)
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths


class PageTables(NamedTuple):
    """The KV pages of each row's sequence."""

    pages: Sequence[array[int]]
    num_shared: Sequence[int]  # leading pages that others wrote
    copied: Sequence[int]  # the page whose contents the first one after those begins with; 0 for none


class BlockFile(NamedTuple):
    """A host slot that is to be written to a file, or read from one."""

    kind: str  # "state" or "kv"
    slot: int
    block_hash: bytes
    exact: bool  # computed as a cold prefill computes it
    born: int  # number of the issue that wrote the block; 0 for one before this process
    writer: int = 0  # number of the request that wrote the block; 0 for one before this process
    if_room: bool = False  # to be written only if no other file must be given up for it


class Transfer(NamedTuple):
    """Blocks to copy between the device's pools and the host's, pairs of (device block, host slot); or, where there are
    `files`, between the host's slots and those."""

    number: int  # transfers are numbered as they begin
    to_host: bool
    states: tuple[tuple[int, int], ...]
    pages: tuple[tuple[int, int], ...]
    files: tuple[BlockFile, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One forward pass over a mixed batch.

    `arrays` holds numpy int32 arrays. N decode rows of T = `tokens_per_decode` tokens come first in the flat batch of
    F tokens, padded with null tokens where a row has fewer; then P prefill rows, back to back, cut into C chunks at
    absolute multiples of 64:

    - `decode_src`, `decode_dst`, `log_slot`, `log_start`, `log_end` (the entry of the first token), `decode_len` (the
      tokens of a row that are not padding) and `late_len` [N]: 0, or of a row that is `late` the tokens that it has if
      it does not end with its log
    - `ancestors` [N * T], if the drafts of a row form a tree: of each token those of its row that it follows on and
      itself, as bits
    - `query_start_loc` [P + 1] (offsets in the flat batch, so the first is N * T); `context_len`, `src` [P]
    - `chunk_seq`, `chunk_start` (offset in the flat batch), `chunk_dst` [C]; `seq_chunk_start` [P + 1]
    - `tokens`, `positions` [F]; with a KV pool also `kv_slot` [F] (block * block_size + offset, -1: do not write),
      `block_table` (the pages of all rows, one row after the other), `block_table_start` [N + P + 1] (where each row's
      pages begin) and `kv_len` [N + P] (tokens readable, this step's included)
    - `logits_index` [L]: offsets in the flat batch of the tokens whose logits are wanted, row by row

    `log_paths` and `kv_paths` are what `keep_paths` is to do in the token logs and in the KV pages before the pass.
    """

    steps: tuple[SequenceStep, ...]
    num_decodes: int
    tokens_per_decode: int
    arrays: dict[str, np.ndarray]
    kv_copies: tuple[tuple[int, int], ...] = ()  # (from, to): KV pages to copy before the pass, once for each fork
    log_paths: np.ndarray | None = None  # int32 [R, 9], None where nothing is to be moved
    kv_paths: np.ndarray | None = None


def layout(rows: Sequence[SequenceStep], decode_rows: int, width: int | None = None) -> dict[str, np.ndarray]:
    """The arrays of states and chunks for rows that stand in this very order: without tokens and KV.

    Args:
        decode_rows: how many rows, from the first on, run in the decode kernels.
        width: tokens of each of those in the batch; None for as many as the longest has.

    Raises:
        ValueError: rows for the decode kernels do not come first, or their number is another one.
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
    """A plan of decode rows alone as one of `rows` rows of `width` tokens: what is added is padding, which reads and
    writes nothing. All logits are wanted. Arrays of equal `rows` and `width` have equal shapes but for `block_table`,
    which comes last.
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


_decode_numbers = attrgetter("start", "num_tokens", "src", "dst", "log_slot", "log_start", "late")


def after_fold(folded: Any, src: Any, dst: Any, log_start: Any, log_end: Any) -> tuple[Any, Any, Any]:
    """Return src, dst and log_start of the rows that follow these.

    The row after a fold reads the stored state, and its log starts where the folded log ended. Others stay as they are.

    Args:
        folded: 1 for a row that has folded its log, else 0. Like all arguments int, or an int32 array or tensor [N].
        log_end: entries of the log behind the row.
    """
    return src + folded * (dst - src), dst - folded * dst, log_start + folded * (log_end % FOLD - log_start)


def decode_arrays(numbers: np.ndarray) -> dict[str, np.ndarray]:
    """`DECODE_ARRAYS` of rows without trees: int32 [N, 7] are start, num_tokens, src, dst, log_slot, log_start and late
    of each."""
    start, num_tokens, src, dst, log_slot, log_start, late = numbers.T.copy()
    log_end = start % FOLD
    columns = src, dst, log_slot, log_start, log_end, np.minimum(num_tokens, FOLD - log_end), num_tokens * (late > 0)
    return dict(zip(DECODE_ARRAYS, columns, strict=True))


def _ancestors(row: SequenceStep, width: int) -> np.ndarray:
    masks = [1]
    for place, parent in enumerate(row.parents or range(width - 1), 1):
        masks.append(masks[parent] | 1 << place)
    return _int32(masks + [0] * (width - len(masks)))


def _path_rows(rows: Sequence[tuple[SequenceStep, int]], size: int) -> np.ndarray | None:
    """Return the moves of `keep_paths` for rows with a slot each. Entry i of a slot holds position i modulo `size`."""
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
        cut = start // CHUNK * CHUNK + CHUNK  # the first one inside the row, if it is before the end
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
    """The plan of rows that are in order, decode first.

    Args:
        tokens: of each row's sequence, as far as they are known.
        tables: None where the KV pages are the host's, or there are none.
    """
    num_decodes = sum([not step.prefill for step in steps])
    decode, prefill = steps[:num_decodes], steps[num_decodes:]
    width = max([step.num_tokens for step in decode], default=1)
    arrays = layout(steps, num_decodes, width)
    most = np.maximum(arrays["decode_len"], arrays["late_len"])
    real = np.arange(width) < most[:, None]  # the tokens of decode rows that are not padding
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
    """Offsets whose logits a prefill row that ends at `end` of the flat batch wants."""
    return range(end - row.num_tokens if row.prompt_logits else end - row.samples, end)


def _kv_arrays(
    steps: Sequence[SequenceStep], tables: PageTables, size: int, positions: np.ndarray
) -> dict[str, np.ndarray]:
    """`positions` are the places of the decode rows' tokens, -1 for padding."""
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
