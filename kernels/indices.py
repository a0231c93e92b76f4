"""Hold a step's index arrays on a device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mambacache.plan import FOLD, MAX_TOKENS_PER_DECODE

ARRIVALS_WIDTH = 32  # int32 per memory line
_ALIGNMENT = 4  # elements: 16 bytes, so kernels see one alignment
_FOLD_FIELDS = ("decode_src", "decode_dst", "log_slot", "log_start", "log_end")
_DECODE = (*_FOLD_FIELDS, "decode_len", "late_len")
_DERIVED = ("depths",)
_PREFILL = ("context_len", "src")
_CHUNK = ("chunk_seq", "chunk_start", "chunk_dst")
_TOKEN = ("tokens", "positions", "kv_slot")
_NO_ROWS = {name: np.zeros(0, np.int32) for name in (*_DECODE, *_DERIVED, "ancestors", *_PREFILL, *_CHUNK)}
_NO_ROWS |= {"folds": np.zeros(1, np.int32), "seq_chunk_start": np.zeros(1, np.int32)}

_Shapes = Mapping[str, tuple[int, ...]]


def pack_arrays(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """Move int32 numpy arrays of any shape to `device` in one transfer (from pinned memory for a GPU).

    Returns views, each at a multiple of 16 bytes. Raises ValueError for other dtypes.
    """
    return _packed(arrays, torch.device(device))[1]


def _packed(arrays: Mapping[str, np.ndarray], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a device vector of all arrays, and views."""
    shapes = {name: array.shape for name, array in arrays.items()}
    flat = _staged(arrays, shapes, device).to(device, non_blocking=True)
    return flat, _views(flat, shapes)


def _staged(arrays: Mapping[str, np.ndarray], shapes: _Shapes, device: torch.device) -> Tensor:
    """Return a new host vector of arrays, padded with zeros: torch reuses pinned memory after copies from it."""
    host = torch.zeros(sum(map(_room, shapes.values())), dtype=torch.int32, pin_memory=device.type == "cuda")
    flat, start = host.numpy(), 0
    for name, shape in shapes.items():
        array = arrays[name]
        if array.dtype != np.int32:
            raise ValueError(
                f"{name} is {array.dtype}, but index arrays must be int32: convert it with astype(np.int32)."
            )
        flat[start : start + array.size] = array.ravel()
        start += _room(shape)
    return host


def _views(flat: Tensor, shapes: _Shapes) -> dict[str, Tensor]:
    rooms = [_room(shape) for shape in shapes.values()]
    views = {}
    for (name, shape), room, part in zip(shapes.items(), rooms, flat.split_with_sizes(rooms), strict=True):
        part = part if shape == (room,) else part[: prod(shape)]
        views[name] = part if len(shape) == 1 else part.reshape(shape)
    return views


@lru_cache(maxsize=512)
def _room(shape: tuple[int, ...]) -> int:
    return -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT


class StateIndices:
    """Hold a step's int32 arrays on a device. `mambacache.plan.StepPlan` lists their names and shapes.

    Block 0 is null: as src a zero state, as dst no store. A decode row appends to a token log, position p at entry p %
    `FOLD`, and ends at an absolute multiple of `FOLD` at the latest. A row with a dst folds state and log into it.

    Args:
        `decode_src`, `decode_dst`: may be equal if no token of the row can be rejected.
        `late_len`: if not 0, other arrays fit the row's earliest place, with any dst that it may need; `place_decodes`
            must run first.
        `ancestors`: by default each token follows all before it. Trees are in preorder, without a dst.
        `chunk_seq`, `chunk_dst`: prefill row of a chunk, and block for the state after it.

    Derived arrays:
        `depths` [N]: depth of each token in its row's tree, 4 bits per token, lowest first.
        `arrivals` [N, 32]: zeros between launches. Ops with the same indices must not overlap.
        `folds` [1 + 5 N]: number of rows with a dst, then src, dst, slot, first and end entry of each.
        `prefill_rows` [P, 6]: first and end token, `context_len`, first and end chunk, `src`; longest row first.
        `row_chunks` [P]: host integers, chunks of `prefill_rows` (None from the constructor).

    Raises ValueError for a T outside 1 to 8, and for tensors not contiguous int32 on one device at multiples of 16
    bytes.
    """

    decode_src: Tensor
    decode_len: Tensor
    late_len: Tensor
    decode_dst: Tensor
    log_slot: Tensor
    log_start: Tensor
    log_end: Tensor
    ancestors: Tensor
    depths: Tensor
    folds: Tensor
    query_start_loc: Tensor
    context_len: Tensor
    src: Tensor
    chunk_seq: Tensor
    chunk_start: Tensor
    chunk_dst: Tensor
    seq_chunk_start: Tensor
    prefill_rows: Tensor
    tokens: Tensor
    positions: Tensor
    kv_slot: Tensor
    block_table: Tensor
    block_table_start: Tensor
    kv_len: Tensor
    logits_index: Tensor

    num_decodes: int
    tokens_per_decode: int
    num_prefills: int
    num_tokens: int
    row_chunks: list[int] | None
    device: torch.device
    flat: Tensor  # all arrays, in order
    pointers: dict[tuple[str, ...], Any]
    derived: dict[str, Any]  # shared by the layers

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        num_decodes: int,
        tokens_per_decode: int,
        num_prefills: int,
        num_tokens: int,
    ) -> None:
        _check_width(tokens_per_decode)
        _check_tensors(tensors)
        self._set(tensors, num_decodes, tokens_per_decode, num_prefills, num_tokens)

    def _set(self, tensors: Mapping[str, Tensor], *counts: int) -> None:
        vars(self).update(tensors)
        self.pointers, self.derived = {}, {}
        self.device = next(iter(tensors.values())).device
        self.num_decodes, self.tokens_per_decode, self.num_prefills, self.num_tokens = counts
        self.row_chunks = None

    @cached_property
    def arrivals(self) -> Tensor:
        return _no_arrivals(self.num_decodes, self.device)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], device: torch.device | str) -> StateIndices:
        """Move a plan's arrays to `device` in one transfer.

        Arrays of absent rows or attention may be left out. T is `query_start_loc[0]` / N, or 1. Raises ValueError for
        arrays that are not int32 or contradict each other, a T above 8, and rows beyond the log.
        """
        arrays = _with_defaults(arrays)
        num_decodes, num_prefills = arrays["decode_src"].size, arrays["src"].size
        tokens_per_decode = _decode_width(arrays, num_decodes)
        _check_decodes(arrays, tokens_per_decode)
        arrays |= _trees(arrays, num_decodes, tokens_per_decode)
        arrays["folds"] = _folds(arrays, num_decodes)
        num_rows = num_decodes + num_prefills
        num_chunks = arrays["chunk_seq"].size
        num_state_tokens = num_decodes * tokens_per_decode
        if not num_prefills:
            arrays["query_start_loc"] = np.array([num_state_tokens], dtype=np.int32)
        elif arrays["query_start_loc"][0] != num_state_tokens:
            raise ValueError(
                "query_start_loc must begin where the decode tokens end, at the number of decode rows times T."
            )
        num_state_tokens = int(arrays["query_start_loc"][-1])
        num_tokens = next((arrays[name].size for name in _TOKEN if name in arrays), num_state_tokens)
        if num_tokens < num_state_tokens:
            raise ValueError(
                f"The token arrays have {num_tokens} entries, but the rows hold {num_state_tokens} tokens:"
                " pass one entry per token."
            )
        lengths = dict.fromkeys(_PREFILL, num_prefills)
        lengths |= dict.fromkeys(("query_start_loc", "seq_chunk_start"), num_prefills + 1)
        lengths |= dict.fromkeys(_CHUNK, num_chunks) | dict.fromkeys(_TOKEN, num_tokens)
        lengths |= {"kv_len": num_rows, "block_table_start": num_rows + 1}
        _check_lengths(arrays, lengths)
        if "block_table_start" in arrays:
            _check_lengths(arrays, {"block_table": int(arrays["block_table_start"][-1])})
        if num_prefills:
            starts, chunks = arrays["query_start_loc"], arrays["seq_chunk_start"]
            columns = starts[:-1], starts[1:], arrays["context_len"], chunks[:-1], chunks[1:], arrays["src"]
            order = np.argsort(-np.diff(starts), kind="stable")
            arrays = {**arrays, "prefill_rows": np.stack(columns, axis=1)[order]}
        indices = cls.__new__(cls)
        indices.flat, tensors = _packed(arrays, torch.device(device))
        indices._set(tensors, num_decodes, tokens_per_decode, num_prefills, num_tokens)
        if num_prefills:
            rows = arrays["prefill_rows"]
            indices.row_chunks = (rows[:, 4] - rows[:, 3]).tolist()
        return indices

    @staticmethod
    def decode_buffers(max_rows: int, tokens_per_decode: int, device: torch.device | str) -> DecodeBuffers:
        """Return buffers of fixed addresses for up to `max_rows` decode rows, for CUDA graphs."""
        return DecodeBuffers(max_rows, tokens_per_decode, torch.device(device))


class DecodeBuffers:
    """Hold decode rows at fixed addresses."""

    def __init__(self, max_rows: int, tokens_per_decode: int, device: torch.device) -> None:
        self.max_rows, self.tokens_per_decode = max_rows, tokens_per_decode
        self._shapes = dict.fromkeys((*_DECODE, *_DERIVED), (max_rows,))
        self._shapes |= {"ancestors": (max_rows * tokens_per_decode,), "folds": (1 + len(_FOLD_FIELDS) * max_rows,)}
        self._shapes |= dict.fromkeys(("query_start_loc", "seq_chunk_start"), (1,))
        self._buffer = torch.zeros(sum(map(_room, self._shapes.values())), dtype=torch.int32, device=device)
        self._arrivals = _no_arrivals(max_rows, device)
        self._indices: dict[int, StateIndices] = {}
        _check_width(tokens_per_decode)

    def fill(self, arrays: Mapping[str, np.ndarray], padded_rows: int) -> StateIndices:
        """Move a plan's decode rows to the device in one transfer, padded to `padded_rows`, on the reading stream.

        Equal `padded_rows` return the same object, valid until the next call: a captured graph reads later contents.
        Raises ValueError as `StateIndices.from_arrays` does, for other rows or widths, and for more than `padded_rows`
        or `max_rows`.
        """
        arrays = _with_defaults(arrays)
        rows = arrays["decode_src"].size
        width = _decode_width(arrays, rows)
        if rows and width != self.tokens_per_decode:
            raise ValueError(
                f"The decode rows have {width} tokens, but the buffers were made for {self.tokens_per_decode}."
            )
        _check_decodes(arrays, width)
        if not rows <= padded_rows <= self.max_rows:
            raise ValueError(
                f"{rows} decode rows do not fit into {padded_rows} padded rows of buffers that hold {self.max_rows}:"
                " rows <= padded_rows <= max_rows must hold."
            )
        if arrays["src"].size:
            raise ValueError(
                f"The step has {arrays['src'].size} prefill rows, which decode buffers do not hold: use"
                " StateIndices.from_arrays."
            )
        query_start_loc = np.array([padded_rows * self.tokens_per_decode], np.int32)
        arrays |= _trees(arrays, rows, width)
        arrays |= {"folds": _folds(arrays, rows), "query_start_loc": query_start_loc}
        self._buffer.copy_(_staged(arrays, self._shapes, self._buffer.device), non_blocking=True)
        indices = self._view(padded_rows)
        indices.derived.clear()
        return indices

    def _view(self, rows: int) -> StateIndices:
        if rows not in self._indices:
            tensors = _views(self._buffer, self._shapes)
            width = self.tokens_per_decode
            tensors |= {name: tensors[name][:rows] for name in (*_DECODE, *_DERIVED)}
            tensors |= {"ancestors": tensors["ancestors"][: rows * width], "arrivals": self._arrivals[:rows]}
            tensors |= dict.fromkeys((*_PREFILL, *_CHUNK), self._buffer[:0])
            self._indices[rows] = StateIndices(tensors, rows, width, 0, rows * width)
        return self._indices[rows]


def _no_arrivals(rows: int, device: torch.device) -> Tensor:
    """Return counters: adjacent counters would slow each other down."""
    return torch.zeros(rows, ARRIVALS_WIDTH, dtype=torch.int32, device=device)


def _with_defaults(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    known = np.zeros(len(arrays.get("decode_len", ())), np.int32)
    return _NO_ROWS | {"late_len": known} | dict(arrays)


def _check_width(tokens_per_decode: int) -> None:
    if not 1 <= tokens_per_decode <= MAX_TOKENS_PER_DECODE:
        raise ValueError(
            f"Decode rows have {tokens_per_decode} tokens, but 1 to {MAX_TOKENS_PER_DECODE} are supported: run longer"
            " ones as prefill rows."
        )


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    device = next(iter(tensors.values())).device
    for name, x in tensors.items():
        start = x.data_ptr()
        if x.dtype != torch.int32 or x.device != device or start % (4 * _ALIGNMENT) or not x.is_contiguous():
            raise ValueError(
                f"{name} is {str(x.dtype).removeprefix('torch.')} on {x.device} at address {start} with strides"
                f" {list(x.stride())}, but index tensors must be int32, contiguous, on one device (here {device}) and"
                " start at multiples of 16 bytes."
            )


def _check_lengths(arrays: Mapping[str, np.ndarray], lengths: Mapping[str, int]) -> None:
    for name, length in lengths.items():
        if name in arrays and len(arrays[name]) != length:
            raise ValueError(f"{name} has {len(arrays[name])} entries where the other arrays need {length}.")


def _decode_width(arrays: Mapping[str, np.ndarray], rows: int) -> int:
    if not rows or "query_start_loc" not in arrays:
        return 1
    width, rest = divmod(int(arrays["query_start_loc"][0]), rows)
    if rest:
        raise ValueError(
            f"query_start_loc begins at {arrays['query_start_loc'][0]}, which is no multiple of {rows} decode rows."
        )
    return width


def _check_decodes(arrays: Mapping[str, np.ndarray], width: int) -> None:
    _check_width(width)
    _check_lengths(arrays, dict.fromkeys(_DECODE, arrays["decode_src"].size))
    lengths, starts, ends = arrays["decode_len"], arrays["log_start"], arrays["log_end"]
    if not lengths.size:
        return
    if lengths.min() < 0 or lengths.max() > width:
        raise ValueError(f"decode_len goes from {lengths.min()} to {lengths.max()}, but a row has {width} tokens.")
    late = arrays["late_len"]
    if late.max() > width or ((late != 0) & (late < lengths)).any():
        raise ValueError(f"late_len goes up to {late.max()}, but must be 0, or between decode_len and {width}.")
    if starts.min() < 0 or (starts > ends).any() or (ends + lengths).max() > FOLD:
        raise ValueError(
            f"A row's log ends before it begins, or its tokens pass the log's {FOLD} entries: end rows at multiples of"
            f" {FOLD} tokens, with a dst, and begin their logs anew there."
        )


@lru_cache(maxsize=512)
def _chains(rows: int, width: int) -> dict[str, np.ndarray]:
    token = np.arange(width, dtype=np.int32)
    return {"ancestors": np.tile((2 << token) - 1, rows), "depths": _packed_depths(np.tile(token, (rows, 1)))}


def _packed_depths(depths: np.ndarray) -> np.ndarray:
    return (depths << 4 * np.arange(depths.shape[1], dtype=np.int32)).sum(axis=1, dtype=np.int32)


def _trees(arrays: Mapping[str, np.ndarray], rows: int, width: int) -> dict[str, np.ndarray]:
    """Return `ancestors` and `depths`."""
    if not arrays["ancestors"].size:
        return _chains(rows, width)
    _check_lengths(arrays, {"ancestors": rows * width})
    ancestors, token = arrays["ancestors"].reshape(rows, width), np.arange(width, dtype=np.int32)
    depths = np.bitwise_count(ancestors).astype(np.int32) - 1
    # `place_decodes` may lengthen a row.
    real = token < np.maximum(arrays["decode_len"], arrays["late_len"])[:, None]
    for t in range(width):
        others = ancestors[:, t] ^ (1 << t)
        below = others | others >> 1
        below |= below >> 2
        below |= below >> 4  # all bits up to the parent's
        path = ancestors[:, t - 1] & below if t else 0  # preorder
        if (real[:, t] & ((others != path) | ((others > 0) != (t > 0)))).any():
            raise ValueError(
                f"ancestors of token {t} of a row are no path of a tree in preorder: give each token's own bit and all "
                "of its parent's, and let a token's descendants follow it at once."
            )
    branches = (real & (depths != token)).any(axis=1)
    if (branches & ((arrays["decode_dst"] != 0) | (arrays["late_len"] != 0))).any():
        raise ValueError("A row whose drafts form a tree has a dst or a late_len: end it before its log does.")
    return {"depths": _packed_depths(np.where(real, depths, 0))}


def _folds(arrays: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
    folds = np.zeros(1 + len(_FOLD_FIELDS) * rows, np.int32)
    if not arrays["decode_dst"].any():
        return folds
    chosen = np.flatnonzero((arrays["decode_dst"] != 0) & (arrays["decode_len"] > 0))
    fields = np.stack([arrays[name][chosen] for name in _FOLD_FIELDS], axis=1)
    fields[:, -1] += arrays["decode_len"][chosen]
    folds[0], folds[1 : 1 + fields.size] = len(chosen), fields.ravel()
    return folds
