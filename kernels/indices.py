"""Index arrays of one step on a device, moved there in one transfer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 4  # elements: every array starts at 16 bytes, so that a kernel's view of its alignment never varies
_DECODE = ("decode_src", "decode_conv_src", "decode_conv_offset", "decode_boundary_index")
_PREFILL = ("context_len", "src", "conv_src", "conv_offset")
_CHUNK = ("chunk_seq", "chunk_start", "chunk_dst")
_TOKEN = ("tokens", "positions", "kv_slot")
_NO_ROWS = {name: np.zeros(0, np.int32) for name in (*_DECODE, *_PREFILL, *_CHUNK)}
_NO_ROWS |= {"decode_dst": np.zeros((0, 1), np.int32), "seq_chunk_start": np.zeros(1, np.int32)}


def pack_arrays(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """Moves int32 numpy arrays of any shape to `device` in one transfer (from pinned memory if it is a GPU).

    Returns tensors of the same names and shapes, views of one buffer, each starting at a multiple of 16 bytes.
    Raises ValueError for an array that is not int32.
    """
    device = torch.device(device)
    offsets = {}
    total = 0
    for name, array in arrays.items():
        if array.dtype != np.int32:
            raise ValueError(
                f"{name} is {array.dtype}, but index arrays must be int32: convert it with astype(np.int32)."
            )
        offsets[name] = total
        total += -(-array.size // _ALIGNMENT) * _ALIGNMENT
    host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for name, array in arrays.items():
        flat[offsets[name] : offsets[name] + array.size] = array.ravel()
    buffer = host.to(device, non_blocking=True)
    return {name: buffer[offsets[name] :][: array.size].view(array.shape) for name, array in arrays.items()}


class StateIndices:
    """Where every op of a step reads and writes: the arrays of a plan as int32 tensors, under their own names.

    The flat batch of F tokens holds N decode rows of T tokens each, then P prefill rows back to back, then perhaps
    padding. Block 0 is null: as src it means a state of zeros that is not read, as dst that nothing is stored.

    - `decode_src`, `decode_conv_src`, `decode_conv_offset`, `decode_boundary_index` [N], `decode_dst` [N, T]: blocks of
      the state and of the window to read, and the window's first row there; the token, past the first, whose dst also
      receives its own window (-1: none); the block for the state after each token. A token whose dst is null is
      padding, which ends a row, except that the first token of a row with a src is always computed.
    - `query_start_loc` [P + 1] (offsets in the flat batch, from N * T), `context_len` (tokens before this step), `src`,
      `conv_src`, `conv_offset` [P]
    - `chunk_seq`, `chunk_start` (offset in the flat batch), `chunk_dst` [C], `seq_chunk_start` [P + 1]: the prefill
      rows cut at absolute multiples of 64, and the block for the state after each chunk
    - `prefill_rows` [P, 6]: of every prefill row its first token and the one after its last, its `context_len`, its
      first chunk and the one after its last, and its `src`; by falling length. Derived here, for kernels that give each
      row a program: they find all of it in one place
    - `tokens`, `positions`, `kv_slot` [F] (block * block_size + offset in the KV pages, -1: do not write),
      `block_table` [N + P, blocks], `kv_len` [N + P] (tokens readable, this step's included), `logits_index`: present
      if they were given, like any other array

    Host integers: `num_decodes` N, `tokens_per_decode` T, `num_prefills` P, `num_tokens` F.
    """

    decode_src: Tensor
    decode_dst: Tensor
    decode_conv_src: Tensor
    decode_conv_offset: Tensor
    decode_boundary_index: Tensor
    query_start_loc: Tensor
    context_len: Tensor
    src: Tensor
    conv_src: Tensor
    conv_offset: Tensor
    chunk_seq: Tensor
    chunk_start: Tensor
    chunk_dst: Tensor
    seq_chunk_start: Tensor
    prefill_rows: Tensor
    tokens: Tensor
    positions: Tensor
    kv_slot: Tensor
    block_table: Tensor
    kv_len: Tensor
    logits_index: Tensor

    num_decodes: int
    tokens_per_decode: int
    num_prefills: int
    num_tokens: int
    device: torch.device

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        num_decodes: int,
        tokens_per_decode: int,
        num_prefills: int,
        num_tokens: int,
    ) -> None:
        vars(self).update(tensors)
        self.device = next(iter(tensors.values())).device
        self.num_decodes = num_decodes
        self.tokens_per_decode = tokens_per_decode
        self.num_prefills = num_prefills
        self.num_tokens = num_tokens

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], device: torch.device | str) -> StateIndices:
        """Moves a plan's int32 arrays to `device` in one transfer.

        A step without decode rows may leave out the decode arrays, one without prefill rows the prefill and chunk
        arrays: empty ones take their place. A host that has no attention may leave out the arrays of tokens and pages.
        Raises ValueError if arrays are not int32 or their lengths contradict each other.
        """
        arrays = _NO_ROWS | dict(arrays)
        num_decodes, tokens_per_decode = arrays["decode_dst"].shape
        num_prefills = arrays["src"].size
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
        lengths = dict.fromkeys(_DECODE, num_decodes) | dict.fromkeys(_PREFILL, num_prefills)
        lengths |= dict.fromkeys(("query_start_loc", "seq_chunk_start"), num_prefills + 1)
        lengths |= dict.fromkeys(_CHUNK, num_chunks) | dict.fromkeys(_TOKEN, num_tokens)
        lengths |= dict.fromkeys(("kv_len", "block_table"), num_rows)
        for name, length in lengths.items():
            if name in arrays and len(arrays[name]) != length:
                raise ValueError(f"{name} has {len(arrays[name])} entries where the other arrays need {length}.")
        if num_prefills:
            starts, chunks = arrays["query_start_loc"], arrays["seq_chunk_start"]
            columns = starts[:-1], starts[1:], arrays["context_len"], chunks[:-1], chunks[1:], arrays["src"]
            order = np.argsort(-np.diff(starts), kind="stable")
            arrays = {**arrays, "prefill_rows": np.stack(columns, axis=1)[order]}
        return cls(pack_arrays(arrays, device), num_decodes, tokens_per_decode, num_prefills, num_tokens)
