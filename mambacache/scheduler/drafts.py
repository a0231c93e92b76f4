"""Where draft tokens come from: code of others, whose guesses may be dropped at any time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from numbers import Integral

from mambacache.scheduler.request import Request

logger = logging.getLogger(__name__)

DraftSource = Callable[[Request, int], Sequence[int]]
"""Proposes at most so many tokens to follow a request's known ones: none if it raises, or gives what is no token."""


class Drafts:
    """Guards a draft source: what it raises, or guesses outside the vocabulary, costs its guess alone."""

    def __init__(self, source: DraftSource, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._failed = False

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens that may come next; none if that is below 1, or the source fails."""
        if limit < 1:
            return ()
        try:
            drafts = tuple(self._source(request, limit)[:limit])
            if not all(isinstance(token, Integral) and 0 <= token < self._vocab_size for token in drafts):
                raise ValueError(f"{drafts} are no token ids: give integers from 0 to {self._vocab_size - 1}")
            return drafts
        except Exception:
            if not self._failed:
                logger.exception("the draft source failed, which is said once: %s goes on without", request.request_id)
            self._failed = True
            return ()


def agreed(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The sampled tokens whose inputs, the drafts before them, were sampled too."""
    taken = [sampled[0]]
    for draft, token in zip(drafts, sampled[1:], strict=True):
        if draft != taken[-1]:
            break
        taken.append(token)
    return taken
