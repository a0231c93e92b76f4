"""Where draft tokens come from: code of others, whose guesses may be dropped at any time."""

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
    """Guesses of which several may come after one token: a row verifies them all, and keeps the path that is right.

    Args:
        tokens: token ids, the more likely ones first, but none before the one that it comes after.
        parents: for each of them the number of the one that it comes after, counted from 1; 0 for a request's last
            known token.
    """

    tokens: Sequence[int]
    parents: Sequence[int]


DraftFunction = Callable[[Request, int], Sequence[int] | DraftTree]
"""Proposes at most so many tokens to follow a request's known ones."""

DraftSource = Callable[[Mapping[Request, int]], Iterable[Sequence[int] | DraftTree]]
"""The same for all rows of a step: a guess for each request, in their order. None for one whose guess raises, or is no
tokens; none for those after the last guess."""


def _in_preorder(tree: DraftTree, count: int) -> Guess:
    """The first so many tokens of a tree, each with all that follows it right behind it.

    Raises:
        ValueError: one comes after none, or after a later one.
    """
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
    """A source that asks a function for each request: what that raises for one costs the others nothing."""
    return lambda limits: map(propose, limits, limits.values())


def on_copies(propose: DraftFunction) -> DraftFunction:
    """Others may change the lists that they are given, as by taking the last token off."""
    return lambda request, limit: propose(
        replace(request, prompt=list(request.prompt), output=list(request.output)), limit
    )


class Drafts:
    """Guards a draft source: what it raises, or guesses outside the vocabulary, costs guesses alone."""

    ahead = False  # it is asked when all tokens are known

    def __init__(self, source: DraftSource, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._failed = False

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, Guess]:
        """For each request at most so many tokens that may come next; none if that is below 1, or the source fails."""
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
    """Drafts that the runner makes where tokens are sampled, and verifies there too: here they are placeholders. None
    for answers whose logits depend on tokens, or on how many there are: those must be known."""

    ahead = True

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, Guess]:
        return {
            request: Guess((PLACEHOLDER,) * limit)
            for request, limit in limits.items()
            if not request.params.adjusts(len(request.output))
        }


def guarded(source: DraftSource | DeviceDrafts, vocab_size: int) -> Drafts | DeviceDrafts:
    """A source as a scheduler asks it."""
    return source if isinstance(source, DeviceDrafts) else Drafts(source, vocab_size)


def drafts_room(request: Request, at: Progress) -> int:
    """How many drafts a decode row can use: up to the end of its log, or, if it may be late, of the answer at most."""
    left = request.params.max_tokens - len(request.output) - at.in_flight - 1
    if at.in_flight and request.drafted:
        return left - request.drafted
    return min(left, FOLD - 1 - at.computed % FOLD)


def agreed(step: SequenceStep, sampled: Sequence[int]) -> list[int]:
    """The places in a row of those whose sampled tokens count: all before them were sampled too. What comes after a
    placeholder, if anything, is right."""
    places = [0]
    while (place := step.draft_after(places[-1], sampled[places[-1]])) and place < len(sampled):
        places.append(place)
    return places
