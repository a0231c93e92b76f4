"""Implement `conv1d`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indices import StateIndices
from .chunks import Chunks
from .elementwise import silu, wide_dtype
from .log import write_log
from .states import computed_decode_tokens, decode_targets, once_a_step, parents, read_states, write_states


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    log: Tensor | None,
    indices: StateIndices,
    activation: str | None = "silu",
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `mambacache.kernels.conv1d`."""
    out = x.new_zeros(x.shape) if out is None else out.zero_()
    if input_gate is not None:
        x = input_gate * x
    num_rows = indices.num_decodes + indices.num_prefills
    if not num_rows:
        return out
    reach = weight.shape[1] - 1
    token, row, row_start = _rows(indices)
    place = token + reach * (row + 1)
    window_start = row_start + reach * torch.arange(num_rows, device=x.device)
    history = x.new_zeros(indices.num_tokens + reach * num_rows, x.shape[1])
    history[place] = x[token]
    windows = read_states(state, torch.cat([indices.decode_src, indices.src]), x.dtype)
    decodes = indices.num_decodes
    if log is not None and decodes:
        windows[:decodes] = _logged_windows(windows[:decodes], log, indices)
        tokens = x[: decodes * indices.tokens_per_decode].unflatten(0, (decodes, indices.tokens_per_decode))
        write_log(log, tokens, indices)
    history[window_start[:, None] + torch.arange(reach, device=x.device)] = windows

    previous = _previous(indices, place, token, len(history))
    outputs = _convolve(history, place, previous, weight, bias)
    out[token] = (silu(outputs) if activation == "silu" else outputs).to(x.dtype)
    if output_gate is not None:
        out[token] *= output_gate[token]

    if decodes and decode_targets(indices).any():
        _write_windows(
            state,
            decode_targets(indices),
            history,
            window_start[:decodes] + computed_decode_tokens(indices).sum(1),
            reach,
        )
    if indices.num_prefills:
        chunks = Chunks.of(indices)
        last = chunks.last + reach * (indices.chunk_seq[: chunks.count] + indices.num_decodes + 1)
        _write_windows(state, indices.chunk_dst[: chunks.count], history, last + 1 - reach, reach)
    return out


@once_a_step
def _rows(indices: StateIndices) -> tuple[Tensor, ...]:
    parts = []
    device = indices.device
    if indices.num_decodes:
        token = computed_decode_tokens(indices).flatten().nonzero().squeeze(1)
        start = torch.arange(indices.num_decodes, device=device) * indices.tokens_per_decode
        parts.append((token, token // indices.tokens_per_decode, start))
    if indices.num_prefills:
        bounds = indices.query_start_loc.long()
        token = torch.arange(int(bounds[0]), int(bounds[-1]), device=device)
        row = torch.arange(indices.num_prefills, device=device).repeat_interleave(bounds.diff()) + indices.num_decodes
        parts.append((token, row, bounds[:-1]))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _previous(indices: StateIndices, place: Tensor, token: Tensor, places: int) -> Tensor:
    """Return each history place's predecessor; decode tokens follow their parents."""
    previous = torch.arange(-1, places - 1, device=place.device)
    if indices.tokens_per_decode > 1 and indices.num_decodes:
        width = indices.tokens_per_decode
        parent = parents(indices).flatten()
        back = torch.where(parent < 0, 1, torch.arange(len(parent), device=place.device) % width - parent)
        decoded = token < len(parent)
        previous[place[decoded]] = place[decoded] - back[token[decoded]]
    return previous


def _convolve(history: Tensor, place: Tensor, previous: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Add taps in a fixed order."""
    dtype = wide_dtype(history)
    places = [place]
    for _ in range(weight.shape[1] - 1):
        places.append(previous[places[-1]])
    total = torch.zeros(len(place), history.shape[1], dtype=dtype, device=history.device)
    if bias is not None:
        total += bias.to(dtype)
    for i, tap in enumerate(reversed(places)):
        total += weight[:, i].to(dtype) * history[tap].to(dtype)
    return total


def _logged_windows(windows: Tensor, log: Tensor, indices: StateIndices) -> Tensor:
    reach = windows.shape[1]
    tap = torch.arange(reach, device=log.device)
    entry = indices.log_end[:, None] - reach + tap
    logged = log[indices.log_slot[:, None], entry.clamp(min=0)]
    row = torch.arange(len(windows), device=log.device)[:, None]
    old = windows[row, (entry - indices.log_start[:, None] + reach).clamp(max=reach - 1)]
    return torch.where((entry >= indices.log_start[:, None])[..., None], logged, old)


def _write_windows(state: Tensor, blocks: Tensor, history: Tensor, start: Tensor, reach: int) -> None:
    write_states(state, blocks, history[start[:, None] + torch.arange(reach, device=start.device)])
