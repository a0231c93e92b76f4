"""Get and check drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from numbers import Integral

from mambacache.plan import FOLD, PLACEHOLDER, Guess, SequenceStep
from mambacache.report import Progress
from mambacache.scheduler.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftTree:
    """Holds drafts that form a tree, verified in one row."""

    tokens: Sequence[int]  # likeliest first, each behind its parent
    parents: Sequence[int]  # numbers from 1; 0 for the last known token


DraftFunction = Callable[[Request, int], Sequence[int] | DraftTree]
"""Proposes at most a number of tokens to follow a request's known tokens."""

DraftSource = Callable[[Mapping[Request, int]], Iterable[Sequence[int] | DraftTree]]
"""Proposes tokens for each request of a step, in order. A bad or missing element gives no drafts."""


def _in_preorder(tree: DraftTree, count: int) -> Guess:
    tokens, parents = tuple(islice(tree.tokens, count)), tuple(islice(tree.parents, count))
    if len(tokens) != len(parents) or not all(0 <= parent <= i for i, parent in enumerate(parents)):
        raise ValueError(f"{tree} is no tree: give each token the number of one before it, or 0")
    following: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for i, parent in enumerate(parents, 1):
        following[parent].append(i)
    order, left, place = list[int](), following[0][::-1], {0: 0}
    while left:
        order.append(left.pop())
        place[order[-1]] = len(order)
        left += following[order[-1]][::-1]
    return Guess(tuple(tokens[i - 1] for i in order), tuple(place[parents[i - 1]] for i in order))


def one_by_one(propose: DraftFunction) -> DraftSource:
    return lambda limits: map(propose, limits, limits.values())


def on_copies(propose: DraftFunction) -> DraftFunction:
    """Pass copies, since `propose` may change the lists."""
    return lambda request, limit: propose(
        replace(request, prompt=list(request.prompt), output=list(request.output)), limit
    )


class Drafts:
    """Wraps a draft source: exceptions and out-of-vocabulary tokens lose drafts, never a request."""

    ahead = False  # it needs all tokens

    def __init__(self, source: DraftSource, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._failed = False

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, Guess]:
        """Return each request's drafts, up to its limit."""
        limits = {request: limit for request, limit in limits.items() if limit > 0}
        found: dict[Request, Guess] = {}
        guesses: Iterator[Sequence[int] | DraftTree] = iter(())
        try:
            guesses = iter(self._source(limits) if limits else ())
        except Exception:
            self._failure()
        for request, limit in limits.items():
            try:
                found[request] = self._checked(next(guesses), limit)
            except Exception:
                self._failure()
        return found

    def _checked(self, given: Sequence[int] | DraftTree, limit: int) -> Guess:
        guess = _in_preorder(given, limit) if isinstance(given, DraftTree) else Guess(tuple(islice(given, limit)))
        if not all(isinstance(token, Integral) and 0 <= token < self._vocab_size for token in guess.drafts):
            raise ValueError(f"{guess.drafts} are no token ids: give integers from 0 to {self._vocab_size - 1}")
        return guess

    def _failure(self) -> None:
        if not self._failed:
            logger.exception("the draft source failed, which is said once: requests go on without its guesses")
        self._failed = True


class DeviceDrafts:
    """Stands for the runner's drafts, except for adjusted logits, which need known tokens."""

    ahead = True

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, Guess]:
        return {
            request: Guess((PLACEHOLDER,) * limit)
            for request, limit in limits.items()
            if not request.params.adjusts(len(request.output))
        }


def drafts_room(request: Request, at: Progress) -> int:
    """Count the drafts that a decode row can use."""
    left = request.params.max_tokens - len(request.output) - at.in_flight - 1
    if at.in_flight and request.drafted:
        return left - request.drafted
    return min(left, FOLD - 1 - at.computed % FOLD)


def agreed(step: SequenceStep, sampled: Sequence[int]) -> list[int]:
    """Return place 0 and the places of accepted drafts."""
    places = [0]
    while (place := step.draft_after(places[-1], sampled[places[-1]])) and place < len(sampled):
        places.append(place)
    return places
