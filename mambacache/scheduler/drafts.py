"""Where draft tokens come from: code of others, whose guesses may be dropped at any time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from numbers import Integral

from mambacache.plan import FOLD, PLACEHOLDER
from mambacache.report import Progress
from mambacache.scheduler.request import Request

logger = logging.getLogger(__name__)

DraftFunction = Callable[[Request, int], Sequence[int]]
"""Proposes at most so many tokens to follow a request's known ones."""

DraftSource = Callable[[Mapping[Request, int]], Iterable[Sequence[int]]]
"""The same for all rows of a step: a guess for each request, in their order. None for one whose guess raises, or is no
tokens; none for those after the last guess."""


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

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        """For each request at most so many tokens that may come next; none if that is below 1, or the source fails."""
        limits = {request: limit for request, limit in limits.items() if limit > 0}
        found: dict[Request, tuple[int, ...]] = {}
        guesses: Iterator[Sequence[int]] = iter(())
        try:
            guesses = iter(self._source(limits) if limits else ())
        except Exception:
            self._failure()
        for request, limit in limits.items():
            try:
                found[request] = self._checked(tuple(islice(next(guesses), limit)))
            except Exception:
                self._failure()
        return found

    def _checked(self, guess: tuple[int, ...]) -> tuple[int, ...]:
        if not all(isinstance(token, Integral) and 0 <= token < self._vocab_size for token in guess):
            raise ValueError(f"{guess} are no token ids: give integers from 0 to {self._vocab_size - 1}")
        return guess

    def _failure(self) -> None:
        if not self._failed:
            logger.exception("the draft source failed, which is said once: requests go on without its guesses")
        self._failed = True


class DeviceDrafts:
    """Drafts that the runner makes where tokens are sampled, and verifies there too: here they are placeholders. None
    for answers whose logits depend on tokens, or on how many there are: those must be known."""

    ahead = True

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        return {
            request: (PLACEHOLDER,) * limit
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


def agreed(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The sampled tokens whose inputs, the drafts before them, were sampled too. What comes after a placeholder, if
    anything, is right."""
    taken = [sampled[0]]
    for draft, token in zip(drafts, sampled[1:], strict=False):
        if draft not in (taken[-1], PLACEHOLDER):
            break
        taken.append(token)
    return taken
