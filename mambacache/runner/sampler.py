"""From logits to tokens: greedy or random draws, and log probabilities."""

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
"""Bits of a row's random number."""

MOST_ORDERED, EVERY = 1024, 1 << 31
"""Of so many tokens at most the most likely are picked out; where it may take more, every one is put in order."""

WEIGHT_BITS = 40
"""Of the most likely token's weight. Sums of integers are the same in whatever order they are added up."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row of a step is sampled.

    Args:
        params: the request's parameters.
        seeds: of its draws, any integers: one, or where a prompt ends one for each answer to it. A draw depends on a
            seed and on the position of the token drawn, on nothing else: it is the same in any batch, after a
            preemption and with drafts.
        prompt_targets: for prompt log probabilities: the prompt tokens that follow the row's first wanted positions.
        adjustments: one for each position after which a token is sampled; empty for none.
        plain: whether it takes the most likely tokens, as the model gave them, and wants no more to be known of them.
    """

    params: SamplingParams
    seeds: Sequence[int]
    prompt_targets: Sequence[int] = ()
    adjustments: Sequence[Adjustment] = ()
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        wanted = self.params.logprobs, self.params.prompt_logprobs
        plain = self.params.temperature == 0 and wanted == (None, None) and not self.adjustments
        object.__setattr__(self, "plain", plain)  # once, not in each step


def random_bits(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """int32 [R] of `DRAW_BITS` random bits, each a hash of a seed and the position of a token.

    Two rounds of the SplitMix64 generator (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    mixed = _splitmix64(_splitmix64(seed) + np.array(positions, dtype=np.uint64))
    return (mixed >> np.uint64(64 - DRAW_BITS)).astype(np.int32)


def draw_parameters(params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """int32 [5, R] for `sample`: temperature, top_p and min_p as the bits of a float32; top_k; the random bits."""
    floats = [[getattr(each, name) for each in params] for name in ("temperature", "top_p", "min_p")]
    integers = [[each.top_k for each in params], random_bits(seeds, positions)]
    return np.concatenate([np.array(floats, dtype=np.float32).view(np.int32), np.array(integers, dtype=np.int32)])


def ordered(params: SamplingParams) -> int:
    """How many of the most likely tokens a draw must have in order: none where nothing but min_p cuts any off."""
    if params.top_k <= 0 and np.float32(params.top_p) == 1:
        return 0
    return params.top_k if 0 < params.top_k <= MOST_ORDERED else EVERY


def draw_groups(params: Sequence[SamplingParams]) -> list[tuple[int, int]]:
    """Of draws that follow each other and are made alike: how many, and how many tokens in order are enough for all."""
    counts = [[*group] for _, group in groupby(map(ordered, params), key=lambda count: (count == 0, count == EVERY))]
    return [(len(group), max(group)) for group in counts]


def likeliest_tokens(logits: torch.Tensor) -> torch.Tensor:
    """int32 [L], the most likely tokens after logits [L, vocabulary]; `NOT_FINITE` if the largest is NaN or infinite.

    It waits for nothing, so that a CUDA graph can hold it.
    """
    tokens = logits.argmax(dim=-1, keepdim=True)  # NaN counts as the largest
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
    """Tokens, the most likely or random ones.

    Args:
        logits: [L, vocabulary]; likeliest: what `likeliest_tokens` gives for them.
        sample_index: int32 [S], after which logits to sample.
        draw_index: int32 [R], which of these to draw at random.
        parameters: int32 [5, R], see `draw_parameters`; groups: of these draws, see `draw_groups`.
        adjustments: None where no sample asks for any.

    Returns:
        int32 [S]; `NOT_FINITE` where the largest logit is NaN or infinite.
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
    """Changes logits, float32 [D, vocabulary], in place."""
    row, token = adjustments.place
    bias, penalty, cost = adjustments.values.view(torch.float32)
    biased = logits[row, token] + bias
    logits[row, token] = torch.where(biased > 0, biased / penalty, biased * penalty) - cost
    return logits


def _draw(logits: torch.Tensor, parameters: torch.Tensor, count: int) -> torch.Tensor:
    """Temperature; then the top_k tokens; of them the smallest set of mass top_p; of it what min_p leaves. The token is
    where the random number falls among the weights that are left, one behind the other: of the `count` most likely ones
    in falling order, or of all as they are numbered if `count` is 0. See `ordered`."""
    temperature, top_p, min_p = parameters[:3].view(torch.float32)[..., None]
    top_k, bits = parameters[3:, :, None]
    tokens = _most_likely(logits, min(count, logits.shape[-1])) if count else None
    chosen = logits if tokens is None else logits.gather(-1, tokens)
    # Below any temperature that float32 can divide by, only the most likely token is left. That one weighs 1.
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
    place.clamp_(max=weights.shape[-1] - 1)  # logits of NaN give no place
    return (place if tokens is None else tokens.gather(-1, place))[:, 0]


def _most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [R, count], in falling order; of tokens that are as likely as each other the lower number comes first."""
    if count > MOST_ORDERED:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    bits = (logits + 0.0).view(torch.int32)  # with one zero in place of two
    bits ^= (bits >> 31) & 0x7FFFFFFF  # integers in the order of the numbers
    keys = (bits.long() << 32) - torch.arange(logits.shape[-1], device=logits.device)
    return -keys.topk(count, dim=-1).values & 0xFFFFFFFF


def score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities, before temperature and truncation.

    Args:
        logits: [K, vocabulary]; tokens: int64 [K].
        top: most likely tokens wanted.

    Returns:
        float32 [K] of `tokens`; int64 and float32 [K, top], the most likely tokens and theirs.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, tokens[:, None])[:, 0], best.indices, best.values


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
