"""Index arrays of one step on a device, moved there in one transfer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mambacache.plan import FOLD, MAX_TOKENS_PER_DECODE

ARRIVALS_WIDTH = 32  # int32 in a line of memory
_ALIGNMENT = 4  # elements: every array starts at 16 bytes, so that a kernel's view of its alignment never varies
_FOLD_FIELDS = ("decode_src", "decode_dst", "log_slot", "log_start", "log_end")
_DECODE = (*_FOLD_FIELDS, "decode_len", "late_len")
_DERIVED = ("depths",)  # of a decode row, as those
_PREFILL = ("context_len", "src")
_CHUNK = ("chunk_seq", "chunk_start", "chunk_dst")
_TOKEN = ("tokens", "positions", "kv_slot")
_NO_ROWS = {name: np.zeros(0, np.int32) for name in (*_DECODE, *_DERIVED, "ancestors", *_PREFILL, *_CHUNK)}
_NO_ROWS |= {"folds": np.zeros(1, np.int32), "seq_chunk_start": np.zeros(1, np.int32)}

_Shapes = Mapping[str, tuple[int, ...]]


def pack_arrays(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """Moves int32 numpy arrays of any shape to `device` in one transfer (from pinned memory if it is a GPU).

    Returns tensors of the same names and shapes, views of one buffer, each starting at a multiple of 16 bytes.
    Raises ValueError for an array that is not int32.
    """
    return _packed(arrays, torch.device(device))[1]


def _packed(arrays: Mapping[str, np.ndarray], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """The vector that holds all arrays on the device, in their order, and their views of it."""
    shapes = {name: array.shape for name, array in arrays.items()}
    flat = _staged(arrays, shapes, device).to(device, non_blocking=True)
    return flat, _views(flat, shapes)


def _staged(arrays: Mapping[str, np.ndarray], shapes: _Shapes, device: torch.device) -> Tensor:
    """One vector on the host with room for arrays of these shapes; those that are shorter end in zeros.

    Its memory is new in every call: torch hands pinned memory out again only when copies from it have ended.
    """
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
    """Parts of a vector as arrays of these shapes, one behind the other."""
    rooms = [_room(shape) for shape in shapes.values()]
    views = {}
    # One call: a slice each takes far longer, and so does asking a part how long it is.
    for (name, shape), room, part in zip(shapes.items(), rooms, flat.split_with_sizes(rooms), strict=True):
        part = part if shape == (room,) else part[: prod(shape)]
        views[name] = part if len(shape) == 1 else part.reshape(shape)
    return views


@lru_cache(maxsize=512)
def _room(shape: tuple[int, ...]) -> int:
    return -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT


class StateIndices:
    """Where every op of a step reads and writes: the arrays of a plan as int32 tensors, under their own names.

    The flat batch of F tokens holds N decode rows of T tokens each, then P prefill rows back to back, then perhaps
    padding. Block 0 is null: as src it means a state of zeros that is not read, as dst that nothing is stored.

    Decode rows read a state and write none: their tokens go to a log of `FOLD` = 16 entries beside it, that of position
    p to entry p % 16. A row's tokens end at an absolute multiple of 16 at the latest. There, and wherever else a row
    has a dst, state and log are folded into a new state, and the log begins anew.

    - `decode_src`, `decode_dst` [N]: blocks of the state to read, which stands before the log's first entry, and of the
      one after the row's last token: src itself perhaps, if no token of the row may be rejected
    - `log_slot`, `log_start`, `log_end` [N]: where a row's log lies, and its entries before this step: from `log_start`
      on, as many as there are tokens since the state, up to `log_end`, where the step's first token goes
    - `decode_len` [N]: how many tokens of a decode row are real, 0 to T. The others, which end a row, are padding:
      nothing of them is stored or changes a result, and their outputs are zeros. So a row of padding has decode_len 0
    - `late_len` [N]: 0 where the host knows where a row begins. Else the other arrays are those of its earliest place,
      with the dst that any of its places needs, and this is how many tokens it has if it does not end with its log:
      `place_decodes` must move the row before it runs. All 0 if left out
    - `ancestors` [N * T]: of each token the ones of its row that it follows on, as a mask of bits: token j is among
      them, or is the token itself, where bit j is set. Left out if each follows on all before it. Where a row's drafts
      form a tree, its tokens stand in preorder, so that those of the path to a token are the last ones of their depths
      before it. Such a row has no dst; `keep_paths` must then bring the entries of the tokens that are kept together
    - `depths` [N]: on how many tokens of its row each one follows, in four bits a token from the lowest on. Derived
      here, so that a kernel has those of a whole row at once
    - `arrivals` [N, 32]: zeros, a line of memory for each decode row. A launch counts there what of a row is prepared
      and what has waited for it, and leaves zeros: so ops with the same indices run one after the other. Made here,
      when an op first asks for them
    - `folds` [1 + 5 N]: how many rows have a dst, then of each its src, dst, slot, and the entries from which and up to
      which it is folded, this step's included. Derived here, for kernels that work on these alone
    - `query_start_loc` [P + 1] (offsets in the flat batch, from N * T), `context_len` (tokens before this step), `src`
      [P]
    - `chunk_seq`, `chunk_start` (offset in the flat batch), `chunk_dst` [C], `seq_chunk_start` [P + 1]: the prefill
      rows cut at absolute multiples of 64, and the block for the state after each chunk
    - `prefill_rows` [P, 6]: of every prefill row its first token and the one after its last, its `context_len`, its
      first chunk and the one after its last, and its `src`; by falling length. Derived here, for kernels that give each
      row a program: they find all of it in one place
    - `tokens`, `positions`, `kv_slot` [F] (block * block_size + offset in the KV pages, -1: do not write),
      `kv_len` [N + P] (tokens readable, this step's included), `block_table_start` [N + P + 1] and `block_table`: the
      pages of row i are `block_table[block_table_start[i] : block_table_start[i + 1]]`, as many as hold its `kv_len`
      tokens or more; `logits_index`. Present if they were given, like any other array

    Host integers: `num_decodes` N, `tokens_per_decode` T (at most 8), `num_prefills` P, `num_tokens` F, and
    `row_chunks` [P]: how many chunks each of the `prefill_rows` has, by which the prefill of an op may choose its
    launches. The constructor is not told, so that they are None.

    The constructor takes tensors that are on the device already, under all of these names; `from_arrays` moves them
    there. It raises ValueError for a T that is not 1 to 8, and for a tensor that is not int32, not contiguous, on
    another device than the others, or does not start at a multiple of 16 bytes.
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
    flat: Tensor  # all arrays of `from_arrays`, in its order: equal shapes up to one of them, equal places up to it
    pointers: dict[tuple[str, ...], Any]  # what kernels keep of them
    derived: dict[str, Any]  # what was made of their contents for an earlier layer of the step

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
        """Moves a plan's int32 arrays to `device` in one transfer.

        A step without decode rows may leave out the decode arrays, one without prefill rows the prefill and chunk
        arrays: empty ones take their place. A host that has no attention may leave out the arrays of tokens and pages.
        Decode rows have as many tokens as `query_start_loc` leaves them, one each if it is left out. Raises ValueError
        if arrays are not int32, if their lengths contradict each other or `decode_len` the tokens of a row, if those
        are more than 8, if a row's tokens do not fit the log, and if `ancestors` are no trees in preorder.
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
        """Index arrays for up to `max_rows` decode rows whose addresses never move, for CUDA graphs.

        Raises ValueError for `tokens_per_decode` that are not 1 to 8.
        """
        return DecodeBuffers(max_rows, tokens_per_decode, torch.device(device))


class DecodeBuffers:
    """The decode rows of one step after the other, at the same addresses: see `StateIndices.decode_buffers`."""

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
        """Moves a plan's decode rows to the device in one transfer, and rows of padding behind them.

        Returns the indices of the first `padded_rows` rows, with `num_tokens` of as many times T, until the next call.
        It is the same object for the same number, so that what was captured with it, from rows of padding perhaps
        (`fill({}, padded_rows)`), reads what later calls bring. They must be made on the stream that reads it.

        Only the decode arrays are taken: tokens, positions and what attention needs have buffers of the host's.

        Raises ValueError for arrays that `StateIndices.from_arrays` would refuse, for prefill rows, for decode rows of
        another width, and for more rows than `padded_rows` or more of these than `max_rows`.
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
    """See `StateIndices.arrivals`. Side by side they would slow each other down, where many programs wait for them."""
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
    """Tokens of each of so many decode rows: those before the first prefill row, evenly divided."""
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
    """`ancestors` and `depths` of rows whose tokens each follow on all before them."""
    token = np.arange(width, dtype=np.int32)
    return {"ancestors": np.tile((2 << token) - 1, rows), "depths": _packed_depths(np.tile(token, (rows, 1)))}


def _packed_depths(depths: np.ndarray) -> np.ndarray:
    """See `StateIndices.depths`, from those of [N, T] tokens."""
    return (depths << 4 * np.arange(depths.shape[1], dtype=np.int32)).sum(axis=1, dtype=np.int32)


def _trees(arrays: Mapping[str, np.ndarray], rows: int, width: int) -> dict[str, np.ndarray]:
    """`ancestors` and `depths` of so many rows; checks those that were given."""
    if not arrays["ancestors"].size:
        return _chains(rows, width)
    _check_lengths(arrays, {"ancestors": rows * width})
    ancestors, token = arrays["ancestors"].reshape(rows, width), np.arange(width, dtype=np.int32)
    depths = np.bitwise_count(ancestors).astype(np.int32) - 1
    # A row that `place_decodes` moves may then have more tokens than at its earliest place.
    real = token < np.maximum(arrays["decode_len"], arrays["late_len"])[:, None]
    for t in range(width):
        others = ancestors[:, t] ^ (1 << t)
        below = others | others >> 1
        below |= below >> 2
        below |= below >> 4  # all bits up to the highest one, that of its parent
        path = ancestors[:, t - 1] & below if t else 0  # in preorder it shares its beginning with the token before it
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
    """See `StateIndices.folds`, for so many rows."""
    folds = np.zeros(1 + len(_FOLD_FIELDS) * rows, np.int32)
    if not arrays["decode_dst"].any():
        return folds
    chosen = np.flatnonzero((arrays["decode_dst"] != 0) & (arrays["decode_len"] > 0))
    fields = np.stack([arrays[name][chosen] for name in _FOLD_FIELDS], axis=1)
    fields[:, -1] += arrays["decode_len"][chosen]
    folds[0], folds[1 : 1 + fields.size] = len(chosen), fields.ravel()
    return folds
