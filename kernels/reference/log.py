"""The token logs of decode rows, and states of which a part is still in a log."""

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
    """bool [N, FOLD]: the entries of every decode row's log before the step."""
    entry = torch.arange(FOLD, device=indices.device)
    return (indices.log_start[:, None] <= entry) & (entry < indices.log_end[:, None])


@once_a_step
def _places(indices: StateIndices) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Row and token of the step's tokens but for those of padding, and slot and entry of each."""
    row, token = computed_decode_tokens(indices).nonzero(as_tuple=True)
    return (row, token), (indices.log_slot[row], indices.log_end[row] + token)


def read_log(log: Tensor, indices: StateIndices, inside: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, FOLD, ...] in `dtype`: of every decode row the entries that are `inside` [N, FOLD], and zeros."""
    return torch.where(inside.view(*inside.shape, *[1] * (log.dim() - 2)), log[indices.log_slot].to(dtype), 0)


def write_log(log: Tensor, values: Tensor, indices: StateIndices) -> None:
    """Writes values [N, T, ...] of the step's tokens to their entries, but for those of padding."""
    tokens, places = _places(indices)
    log[places] = values[tokens].to(log.dtype)


def sums_of_decays(g: Tensor, log: Tensor, indices: StateIndices) -> Tensor:
    """Log decays g [N, T, ...] of the step's tokens to sums in log2 since the first entries of logs [slots, FOLD, ...].

    Added one by one to what the log holds, along the paths of trees: how tokens are cut into steps changes no bit.
    """
    row = torch.arange(len(g), device=g.device)
    before = read_log(log, indices, entries_before(indices), g.dtype)[row, (indices.log_end - 1).clamp(min=0)]
    totals = [before]
    for token, decay in enumerate((g * LOG2_E).clamp(min=LEAST_DECAY).unbind(1)):
        parent = parents(indices)[:, token]
        totals.append(torch.stack(totals)[parent + 1, row] + decay)
    return torch.stack(totals[1:], dim=1)


class LoggedStates:
    """States [H, V, K] of decode rows, each the one that its row reads and outer products of the log's entries.

    With G_e the sum of log decays up to entry e, the state after entry t is

        S 2^G_t + sum_{e <= t} values_e (2^(G_t - G_e) keys_e)^T

    The step's tokens are entered one by one, each in the place of its depth: in preorder those of its path are the last
    ones that were entered before it, so that sums have the order of a row without branches, bit by bit.
    """

    def __init__(self, state: Tensor, indices: StateIndices, values: Tensor, keys: Tensor, sums: Tensor) -> None:
        """Entries of all rows before the step, with zeros outside their windows: values [N, FOLD, H, V], keys
        [N, FOLD, H, K], and sums [N, FOLD, H, K], or [N, FOLD, H, 1] where all channels decay alike."""
        self.indices = indices
        self.states = read_states(state, indices.decode_src, values.dtype)
        self.values = values.permute(0, 2, 3, 1).contiguous()
        self.keys, self.sums = keys.transpose(1, 2).contiguous(), sums.transpose(1, 2).contiguous()
        self._places = indices.log_end[:, None] + depths(indices)

    def enter(self, token: int, keys: Tensor, sums: Tensor) -> Callable[[Tensor], Tensor]:
        """Enters the step's token with its keys [N, H, K] and sums, and gives what multiplies vectors [N, H, K] with
        every row's state after it, as far as values were added."""
        row = (self.indices.decode_len > token).nonzero().squeeze(1)
        place = self._places[row, token]
        self.keys[row, :, place], self.sums[row, :, place] = keys[row], sums[row]
        later = torch.arange(FOLD, device=place.device) >= place[:, None]  # of siblings, which may be no numbers
        self.values[row] = self.values[row].masked_fill(later[:, None, None], 0)
        decay, decayed = self._decayed(self._places[:, token] + 1)

        def product(vector: Tensor) -> Tensor:
            vector = vector[:, :, None]
            scores = (decayed * vector).sum(-1)
            return (self.states * (decay * vector)).sum(-1) + (self.values * scores[:, :, None]).sum(-1)

        return product

    def add(self, token: int, values: Tensor) -> None:
        """Adds values [N, H, V] to the entries of the step's token."""
        row = (self.indices.decode_len > token).nonzero().squeeze(1)
        self.values[row, :, :, self._places[row, token]] = values[row]

    def fold(self, state: Tensor) -> None:
        """Stores the state after every row's last token where the row has a dst."""
        targets = decode_targets(self.indices)
        row = targets.nonzero().squeeze(1)
        if not len(row):
            return
        decay, keys = self._decayed(self.indices.log_end + self.indices.decode_len)
        states = decay[row] * self.states[row] + self.values[row] @ keys[row]
        state[targets[row]] = states.to(state.dtype)

    def _decayed(self, end: Tensor) -> tuple[Tensor, Tensor]:
        """What is left before the entry `end` [N]: decays [N, H, 1, K or 1] of states, and keys [N, H, FOLD, K]."""
        row, entry = (torch.arange(count, device=end.device) for count in (len(end), FOLD))
        total = self.sums[row, :, (end - 1).clamp(0, FOLD - 1)][:, :, None]  # padding may lie beyond the log
        earlier = entry < end[:, None]
        keys = self.keys * exp2(total - self.sums)
        return exp2(total), torch.where(earlier[:, None, :, None], keys, 0)
