"""Read and write token logs."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

import torch
from torch import Tensor

from mambacache.plan import FOLD

from ..indices import StateIndices
from .elementwise import exp2
from .states import computed_decode_tokens, decode_targets, depths, once_a_step, parents, read_states

LOG2_E = log2(torch.e)
LEAST_DECAY = -34.6  # see `kernels.logs`


@once_a_step
def entries_before(indices: StateIndices) -> Tensor:
    entry = torch.arange(FOLD, device=indices.device)
    return (indices.log_start[:, None] <= entry) & (entry < indices.log_end[:, None])


@once_a_step
def _places(indices: StateIndices) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    row, token = computed_decode_tokens(indices).nonzero(as_tuple=True)
    return (row, token), (indices.log_slot[row], indices.log_end[row] + token)


def read_log(log: Tensor, indices: StateIndices, inside: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(inside.view(*inside.shape, *[1] * (log.dim() - 2)), log[indices.log_slot].to(dtype), 0)


def write_log(log: Tensor, values: Tensor, indices: StateIndices) -> None:
    tokens, places = _places(indices)
    log[places] = values[tokens].to(log.dtype)


def sums_of_decays(g: Tensor, log: Tensor, indices: StateIndices) -> Tensor:
    """Add each decay to its parent's sum, so that steps change no bit."""
    row = torch.arange(len(g), device=g.device)
    before = read_log(log, indices, entries_before(indices), g.dtype)[row, (indices.log_end - 1).clamp(min=0)]
    totals = [before]
    for token, decay in enumerate((g * LOG2_E).clamp(min=LEAST_DECAY).unbind(1)):
        parent = parents(indices)[:, token]
        totals.append(torch.stack(totals)[parent + 1, row] + decay)
    return torch.stack(totals[1:], dim=1)


class LoggedStates:
    """Hold states [H, V, K] as read, plus outer products of log entries.

    With G_e the sum of log decays up to entry e, the state after entry t is

        S 2^G_t + sum_{e <= t} values_e (2^(G_t - G_e) keys_e)^T

    A token enters at its depth, so a path sums like a row without branches.
    """

    def __init__(self, state: Tensor, indices: StateIndices, values: Tensor, keys: Tensor, sums: Tensor) -> None:
        """Take entries, zero outside logs: values [N, FOLD, H, V], keys [N, FOLD, H, K], sums [N, FOLD, H, K or 1]."""
        self.indices = indices
        self.states = read_states(state, indices.decode_src, values.dtype)
        self.values = values.permute(0, 2, 3, 1).contiguous()
        self.keys, self.sums = keys.transpose(1, 2).contiguous(), sums.transpose(1, 2).contiguous()
        self._places = indices.log_end[:, None] + depths(indices)

    def enter(self, token: int, keys: Tensor, sums: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function that multiplies the states after a token with vectors [N, H, K]."""
        row = (self.indices.decode_len > token).nonzero().squeeze(1)
        place = self._places[row, token]
        self.keys[row, :, place], self.sums[row, :, place] = keys[row], sums[row]
        later = torch.arange(FOLD, device=place.device) >= place[:, None]  # siblings, perhaps NaN
        self.values[row] = self.values[row].masked_fill(later[:, None, None], 0)
        decay, decayed = self._decayed(self._places[:, token] + 1)

        def product(vector: Tensor) -> Tensor:
            vector = vector[:, :, None]
            scores = (decayed * vector).sum(-1)
            return (self.states * (decay * vector)).sum(-1) + (self.values * scores[:, :, None]).sum(-1)

        return product

    def add(self, token: int, values: Tensor) -> None:
        row = (self.indices.decode_len > token).nonzero().squeeze(1)
        self.values[row, :, :, self._places[row, token]] = values[row]

    def fold(self, state: Tensor) -> None:
        targets = decode_targets(self.indices)
        row = targets.nonzero().squeeze(1)
        if not len(row):
            return
        decay, keys = self._decayed(self.indices.log_end + self.indices.decode_len)
        states = decay[row] * self.states[row] + self.values[row] @ keys[row]
        state[targets[row]] = states.to(state.dtype)

    def _decayed(self, end: Tensor) -> tuple[Tensor, Tensor]:
        row, entry = (torch.arange(count, device=end.device) for count in (len(end), FOLD))
        total = self.sums[row, :, (end - 1).clamp(0, FOLD - 1)][:, :, None]
        earlier = entry < end[:, None]
        keys = self.keys * exp2(total - self.sums)
        return exp2(total), torch.where(earlier[:, None, :, None], keys, 0)
