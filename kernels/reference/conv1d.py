"""Causal depthwise convolution over a mixed batch, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indices import StateIndices
from .chunks import Chunks
from .elementwise import silu
from .states import computed_decode_tokens, decode_targets, write_states


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    indices: StateIndices,
    activation: str | None = "silu",
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `mambacache.kernels.conv1d`. One history holds, row by row, the row's source window and then its tokens."""
    out = x.new_zeros(x.shape) if out is None else out.zero_()
    if input_gate is not None:
        x = input_gate * x
    num_rows = indices.num_decodes + indices.num_prefills
    if not num_rows:
        return out
    reach = weight.shape[1] - 1  # tokens before its own that an output sees
    token, row, row_start, source, offset = _rows(indices)
    place = token + reach * (row + 1)  # of a token in the history
    window_start = row_start + reach * torch.arange(num_rows, device=x.device)
    history = x.new_zeros(indices.num_tokens + reach * num_rows, x.shape[1])
    history[place] = x[token]
    history[window_start[:, None] + torch.arange(reach, device=x.device)] = _read_windows(state, source, offset, reach)

    outputs = _convolve(history, weight, bias)[place - reach]
    out[token] = (silu(outputs) if activation == "silu" else outputs).to(x.dtype)
    if output_gate is not None:
        out[token] *= output_gate[token]

    if indices.num_decodes:
        targets = decode_targets(indices)
        width = reach - 1 + indices.tokens_per_decode
        _write_windows(state, targets[:, 0], history, window_start[: indices.num_decodes] + 1, width)
        row = (indices.decode_boundary_index > 0).nonzero().squeeze(1)
        boundary = indices.decode_boundary_index[row].long()
        _write_windows(state, targets[row, boundary], history, window_start[row] + 1 + boundary, reach)
    if indices.num_prefills:
        chunks = Chunks.of(indices)
        last = chunks.last + reach * (indices.chunk_seq[: chunks.count] + indices.num_decodes + 1)
        _write_windows(state, indices.chunk_dst[: chunks.count], history, last + 1 - reach, reach)
    return out


def _rows(indices: StateIndices) -> tuple[Tensor, ...]:
    """The computed tokens [n] and the row of each, then each row's first token, window block and window offset."""
    parts = []
    device = indices.device
    if indices.num_decodes:
        token = computed_decode_tokens(indices).flatten().nonzero().squeeze(1)
        start = torch.arange(indices.num_decodes, device=device) * indices.tokens_per_decode
        row = token // indices.tokens_per_decode
        parts.append((token, row, start, indices.decode_conv_src, indices.decode_conv_offset))
    if indices.num_prefills:
        bounds = indices.query_start_loc.long()
        token = torch.arange(int(bounds[0]), int(bounds[-1]), device=device)
        row = torch.arange(indices.num_prefills, device=device).repeat_interleave(bounds.diff()) + indices.num_decodes
        parts.append((token, row, bounds[:-1], indices.conv_src, indices.conv_offset))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _convolve(history: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Output i ends at place i + W - 1. Taps are added one by one: no sum whose order could vary."""
    dtype = torch.float64 if history.dtype == torch.float64 else torch.float32
    width = weight.shape[1]
    count = len(history) - width + 1
    total = torch.zeros(count, history.shape[1], dtype=dtype, device=history.device)
    if bias is not None:
        total += bias.to(dtype)
    for i in range(width):
        total += weight[:, i].to(dtype) * history[i : i + count].to(dtype)
    return total


def _read_windows(state: Tensor, blocks: Tensor, offsets: Tensor, reach: int) -> Tensor:
    """[n, reach, dim]: rows from `offsets` [n] on of the windows in `blocks` [n]."""
    tap = offsets[:, None] + torch.arange(reach, device=blocks.device)
    windows = state[blocks[:, None], tap]
    windows[blocks == 0] = 0
    return windows


def _write_windows(state: Tensor, blocks: Tensor, history: Tensor, start: Tensor, width: int) -> None:
    """Writes to each block `width` inputs from `start` in the history on, and zeros after them.

    In a row of decode with W - 2 + T of them, those from row j on are the window after token j.
    """
    windows = state.new_zeros(len(blocks), *state.shape[1:])
    windows[:, :width] = history[start[:, None] + torch.arange(width, device=start.device)]
    write_states(state, blocks, windows)
