"""Causal depthwise convolution over a mixed batch, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indices import StateIndices
from .chunks import Chunks
from .elementwise import silu
from .states import computed_decode_tokens, write_states


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    indices: StateIndices,
    activation: str | None = "silu",
) -> Tensor:
    """See `mambacache.kernels.conv1d`. One history holds, row by row, the row's source window and then its tokens."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    reach = weight.shape[1] - 1  # tokens before its own that an output sees
    num_decodes, tokens_per_decode = indices.num_decodes, indices.tokens_per_decode
    device = x.device

    tokens, rows, row_starts, sources, offsets = [], [], [], [], []
    if num_decodes:
        computed = computed_decode_tokens(indices).flatten().nonzero().squeeze(1)
        tokens.append(computed)
        rows.append(computed // tokens_per_decode)
        row_starts.append(torch.arange(num_decodes, device=device) * tokens_per_decode)
        sources.append(indices.decode_conv_src)
        offsets.append(indices.decode_conv_offset)
    if indices.num_prefills:
        starts = indices.query_start_loc.long()
        lengths = starts.diff()
        tokens.append(torch.arange(int(starts[0]), int(starts[-1]), device=device))
        rows.append(torch.arange(indices.num_prefills, device=device).repeat_interleave(lengths) + num_decodes)
        row_starts.append(starts[:-1])
        sources.append(indices.conv_src)
        offsets.append(indices.conv_offset)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if not tokens:
        return out

    token = torch.cat(tokens)
    window_start = torch.cat(row_starts) + reach * torch.arange(num_decodes + indices.num_prefills, device=device)
    place = token + reach * (torch.cat(rows) + 1)  # of a token in the history
    tap = torch.arange(reach, device=device)
    source = torch.cat(sources)
    history = x.new_zeros(indices.num_tokens + reach * len(source), x.shape[1])
    history[place] = x[token]
    history[window_start[:, None] + tap] = _read_windows(state, source, torch.cat(offsets), reach)

    total = torch.zeros(len(token), x.shape[1], dtype=dtype, device=device) if bias is None else bias.to(dtype)
    for i in range(reach + 1):
        total = total + weight[:, i].to(dtype) * history[place - reach + i].to(dtype)
    out[token] = (silu(total) if activation == "silu" else total).to(x.dtype)

    if num_decodes:
        _write_wide_windows(state, indices, history, window_start[:num_decodes], reach)
        boundary = indices.decode_boundary_index.long()
        row = (boundary > 0).nonzero().squeeze(1)
        boundary = boundary[row]
        _write_windows(state, indices.decode_dst[row, boundary], history, window_start[row] + reach + boundary, reach)
    if indices.num_prefills:
        chunks = Chunks.of(indices)
        last = chunks.last + reach * (indices.chunk_seq[: chunks.count] + num_decodes + 1)
        _write_windows(state, indices.chunk_dst[: chunks.count], history, last, reach)
    return out


def _read_windows(state: Tensor, blocks: Tensor, offsets: Tensor, reach: int) -> Tensor:
    """[n, reach, dim]: rows from `offsets` [n] on of the windows in `blocks` [n]."""
    tap = offsets[:, None] + torch.arange(reach, device=blocks.device)
    windows = state[blocks[:, None], tap]
    windows[blocks == 0] = 0
    return windows


def _write_windows(state: Tensor, blocks: Tensor, history: Tensor, last: Tensor, reach: int) -> None:
    """Writes to each block the window after the token at `last` in the history, and zeros after it."""
    windows = state.new_zeros(len(blocks), *state.shape[1:])
    windows[:, :reach] = history[last[:, None] + 1 - reach + torch.arange(reach, device=last.device)]
    write_states(state, blocks, windows)


def _write_wide_windows(state: Tensor, indices: StateIndices, history: Tensor, start: Tensor, reach: int) -> None:
    """Writes to every row's first dst all its windows at once: `reach` rows from row j on are the one after token j."""
    width = reach - 1 + indices.tokens_per_decode
    windows = state.new_zeros(len(start), *state.shape[1:])
    windows[:, :width] = history[start[:, None] + 1 + torch.arange(width, device=start.device)]
    write_states(state, indices.decode_dst[:, 0], windows)
