"""Sample tokens, and compute log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from mambacache.config import SamplingParams
from mambacache.plan import NOT_FINITE
from mambacache.runner.adjustments import Adjustment, Adjustments

DRAW_BITS = 31
"""Bits of a draw's random number."""

MOST_ORDERED, EVERY = 1024, 1 << 31
"""`EVERY` marks a sort of the vocabulary, for more than `MOST_ORDERED` most likely tokens."""

WEIGHT_BITS = 40
"""Bits of the largest weight. Integer sums do not depend on the order of addition."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Describes a batch row's sampling. A draw depends only on its seed and position."""

    params: SamplingParams
    seeds: Sequence[int]  # a seed, or a seed for each answer where a prompt ends
    prompt_targets: Sequence[int] = ()  # prompt tokens to score
    adjustments: Sequence[Adjustment] = ()
    plain: bool = field(init=False)  # greedy, without adjustments and log probabilities

    def __post_init__(self) -> None:
        wanted = self.params.logprobs, self.params.prompt_logprobs
        plain = self.params.temperature == 0 and wanted == (None, None) and not self.adjustments
        object.__setattr__(self, "plain", plain)


def random_bits(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return random bits, int32 [R], by two rounds of SplitMix64."""
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    mixed = _splitmix64(_splitmix64(seed) + np.array(positions, dtype=np.uint64))
    return (mixed >> np.uint64(64 - DRAW_BITS)).astype(np.int32)


def draw_parameters(params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return int32 [5, R]: temperature, top_p and min_p as float32 bits; top_k; the random bits."""
    floats = [[getattr(each, name) for each in params] for name in ("temperature", "top_p", "min_p")]
    integers = [[each.top_k for each in params], random_bits(seeds, positions)]
    return np.concatenate([np.array(floats, dtype=np.float32).view(np.int32), np.array(integers, dtype=np.int32)])


def ordered(params: SamplingParams) -> int:
    """Count the likeliest tokens that a draw sorts."""
    if params.top_k <= 0 and np.float32(params.top_p) == 1:
        return 0
    return params.top_k if 0 < params.top_k <= MOST_ORDERED else EVERY


def draw_groups(params: Sequence[SamplingParams]) -> list[tuple[int, int]]:
    """Return the size and largest `ordered` of each run of draws."""
    counts = [[*group] for _, group in groupby(map(ordered, params), key=lambda count: (count == 0, count == EVERY))]
    return [(len(group), max(group)) for group in counts]


def likeliest_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely tokens, int32 [L], of logits [L, vocabulary]; `NOT_FINITE` for a NaN or infinite maximum.

    CUDA graphs capture it: it must not synchronise.
    """
    tokens = logits.argmax(dim=-1, keepdim=True)  # argmax prefers NaN
    return tokens.int().masked_fill_(~logits.gather(-1, tokens).isfinite(), NOT_FINITE)[:, 0]


def sample(
    logits: torch.Tensor,
    likeliest: torch.Tensor,
    sample_index: torch.Tensor,
    draw_index: torch.Tensor,
    parameters: torch.Tensor,
    groups: Sequence[tuple[int, int]],
    adjustments: Adjustments | None = None,
) -> torch.Tensor:
    """Return samples, int32 [S], or `NOT_FINITE`.

    Args:
        logits: [L, vocabulary].
        likeliest: int32 [L].
        sample_index: int32 [S], rows of `logits`.
        draw_index: int32 [R], samples drawn at random.
        parameters: int32 [5, R].
    """
    tokens = likeliest.index_select(0, sample_index)
    if adjustments is None and not groups:
        return tokens
    unsound = tokens == NOT_FINITE
    if adjustments is not None:
        adjusted = _adjust(logits[sample_index[adjustments.samples]].float(), adjustments)
        tokens[adjustments.samples] = adjusted.argmax(dim=-1).int()
    if groups:
        drawn = logits[sample_index[draw_index]].float()
        if adjustments is not None:
            drawn[adjustments.draws[0]] = adjusted[adjustments.draws[1]]
        sizes = [size for size, _ in groups]
        parts = zip(drawn.split(sizes), parameters.split(sizes, dim=1), groups, strict=True)
        tokens[draw_index] = torch.cat([_draw(part, of_it, count) for part, of_it, (_, count) in parts]).int()
    return tokens.masked_fill_(unsound, NOT_FINITE)


def _adjust(logits: torch.Tensor, adjustments: Adjustments) -> torch.Tensor:
    """Adjust logits, float32 [D, vocabulary], in place."""
    row, token = adjustments.place
    bias, penalty, cost = adjustments.values.view(torch.float32)
    biased = logits[row, token] + bias
    logits[row, token] = torch.where(biased > 0, biased / penalty, biased * penalty) - cost
    return logits


def _draw(logits: torch.Tensor, parameters: torch.Tensor, count: int) -> torch.Tensor:
    """Draw tokens, int64 [R], with temperature, top_k, top_p and min_p in this order.

    Weigh the `count` most likely tokens, falling; or all in token order if `count` is 0.
    """
    temperature, top_p, min_p = parameters[:3].view(torch.float32)[..., None]
    top_k, bits = parameters[3:, :, None]
    tokens = _most_likely(logits, min(count, logits.shape[-1])) if count else None
    chosen = logits if tokens is None else logits.gather(-1, tokens)
    # The clamp keeps the largest weight at 1 if the temperature rounds to 0.
    falls = (chosen - chosen.amax(dim=-1, keepdim=True)) / temperature.clamp(min=torch.finfo(torch.float32).tiny)
    weights = falls.exp()
    kept = weights >= min_p
    weights = (weights * (1 << WEIGHT_BITS)).long()
    if tokens is not None:
        rank = torch.arange(tokens.shape[-1], device=tokens.device)
        weights = weights.masked_fill(rank >= torch.where(top_k > 0, top_k, logits.shape[-1]), 0)
        mass = weights.cumsum(dim=-1)
        kept &= ((mass - weights).double() < top_p.double() * mass[:, -1:].double()) | (rank == 0)
    mass = weights.masked_fill(~kept, 0).cumsum(dim=-1)
    number = (mass[:, -1:].double() * ((bits.double() + 0.5) / 2**DRAW_BITS)).long()
    place = torch.searchsorted(mass, number, right=True)
    place.clamp_(max=weights.shape[-1] - 1)  # for NaN logits
    return (place if tokens is None else tokens.gather(-1, place))[:, 0]


def _most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the most likely tokens, int64 [R, count], falling; the lower of equal tokens first."""
    if count > MOST_ORDERED:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    bits = (logits + 0.0).view(torch.int32)  # turns -0.0 into 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # maps floats to integers in the same order
    keys = (bits.long() << 32) - torch.arange(logits.shape[-1], device=logits.device)
    return -keys.topk(count, dim=-1).values & 0xFFFFFFFF


def score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log probabilities, before temperature, of `tokens` int64 [K] under `logits` [K, vocabulary].

    Returns:
        float32 [K]; the most likely tokens, int64 [K, top]; and theirs.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens[:, None])[:, 0], best.indices, best.values


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
