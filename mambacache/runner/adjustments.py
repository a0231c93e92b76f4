"""Compute penalties, biases and `min_tokens` for logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from mambacache.config import SamplingParams


class Adjustment(NamedTuple):
    """Adds `bias` to logits, divides positive or multiplies negative sums by `penalty`, subtracts `cost`."""

    tokens: np.ndarray  # int64 [k], distinct
    bias: np.ndarray  # all float32 [k]
    penalty: np.ndarray
    cost: np.ndarray


class Tally:
    """Tracks an answer's adjustments; forbids `end_tokens` before `min_tokens`."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], end_tokens: Iterable[int]) -> None:
        self._params = params
        self._read = 0
        given, ends = params.logit_bias or {}, sorted(end_tokens) if params.min_tokens else []
        seen = prompt if params.repetition_penalty != 1 else ()
        self._tokens = np.unique(np.array([*seen, *given, *ends], dtype=np.int64))
        self._bias, self._penalty, self._count = np.zeros((3, len(self._tokens)), dtype=np.float32)
        self._bias[self._tokens.searchsorted(list(given))] = list(given.values())
        self._penalty[:] = 1
        self._penalty[self._tokens.searchsorted(np.unique(np.array(seen, dtype=np.int64)))] = params.repetition_penalty
        self._ends = np.array(ends, dtype=np.int64)

    def after(
        self, answer: Sequence[int], drafts: Sequence[int] = (), unread: int = 0, parents: Sequence[int] = ()
    ) -> list[Adjustment]:
        """Return the adjustments after `answer`, which extends the last call's, and after each draft.

        `unread` counts sampled tokens that `answer` lacks; 0 with penalties.
        """
        self._note(answer[self._read :])
        self._read = len(answer)
        known = [(self._tokens, self._bias, self._penalty, self._count, 0)]
        found = [self._adjustment(len(answer) + unread)]
        for draft, parent in zip(drafts, parents or range(len(drafts)), strict=True):
            self._tokens, self._bias, penalty, count, depth = known[parent]
            self._penalty, self._count = penalty.copy(), count.copy()  # siblings share them
            self._note([draft])
            found.append(self._adjustment(len(answer) + depth + 1))
            known.append((self._tokens, self._bias, self._penalty, self._count, depth + 1))
        self._tokens, self._bias, self._penalty, self._count, _ = known[0]
        return found

    def _note(self, answer: Sequence[int]) -> None:
        for token in answer if self._params.penalizes else ():
            place = int(self._tokens.searchsorted(token))
            if place == len(self._tokens) or self._tokens[place] != token:
                self._tokens = np.insert(self._tokens, place, token)
                self._bias = np.insert(self._bias, place, 0)
                self._penalty = np.insert(self._penalty, place, 1)
                self._count = np.insert(self._count, place, 0)
            self._count[place] += 1
            self._penalty[place] = self._params.repetition_penalty

    def _adjustment(self, num_answered: int) -> Adjustment:
        params, bias = self._params, self._bias
        if num_answered < params.min_tokens:
            bias = bias.copy()
            bias[self._tokens.searchsorted(self._ends)] = -np.inf
        cost = params.presence_penalty * (self._count > 0) + params.frequency_penalty * self._count
        return Adjustment(self._tokens, bias, self._penalty.copy(), cost.astype(np.float32))


class Adjustments(NamedTuple):
    """Holds a step's adjustments on the device, int32."""

    samples: torch.Tensor  # [D]
    draws: torch.Tensor  # [2, D'], random draws, and their indices in `samples`
    place: torch.Tensor  # [2, A], index in `samples` and token
    values: torch.Tensor  # [3, A], float32 bits of bias, penalty and cost


def adjustment_arrays(adjusted: Mapping[int, Adjustment], drawn: Sequence[int]) -> dict[str, np.ndarray]:
    number = {sample: i for i, sample in enumerate(adjusted)}
    draws = [(i, number[sample]) for i, sample in enumerate(drawn) if sample in number]
    rows = np.repeat(np.arange(len(adjusted)), [len(each.tokens) for each in adjusted.values()])
    empty = Adjustment(np.zeros(0, np.int64), *np.zeros((3, 0), np.float32))
    tokens, *values = (np.concatenate(column) for column in zip(empty, *adjusted.values(), strict=True))
    return {
        "adjusted_samples": np.array(list(adjusted), dtype=np.int32),
        "adjusted_draws": np.array(draws, dtype=np.int32).reshape(-1, 2).T.copy(),
        "adjusted_place": np.stack([rows, tokens]).astype(np.int32),
        "adjusted_values": np.stack(values).astype(np.float32).view(np.int32),
    }
