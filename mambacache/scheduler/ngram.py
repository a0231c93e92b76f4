"""Drafts from the request itself: what followed its last tokens where they stood before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from mambacache.scheduler.request import Request

SHORTEST, LONGEST = 2, 4
"""Of how many last tokens an earlier place is looked for: a longer match goes before a shorter one."""


class PromptLookup:
    """A `DraftSource` that copies: good where answers repeat parts of their prompts, as quotations, edits or code do.

    Each call looks at every known token once: 23 µs for 100,000 random ones on one x86 core.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Request, array[int]] = WeakKeyDictionary()

    def __call__(self, request: Request, limit: int) -> Sequence[int]:
        """At most `limit` tokens that may come next; none without a match of `SHORTEST` tokens."""
        known = self._known.get(request)
        if known is None:
            known = self._known[request] = array("i", request.prompt)
        known.extend(request.output[len(known) - len(request.prompt) :])
        return follow(np.array(known), limit)  # a copy: what an exception keeps could not be extended


def follow(tokens: np.ndarray, limit: int) -> list[int]:
    """What followed the last of `tokens` (int32 [n]) at the latest of the longest matches before that has `limit` more,
    or at the earliest of them."""
    ends, width = np.flatnonzero(tokens[:-1] == tokens[-1]), 1
    while len(ends) and width < LONGEST:
        ends_wider = ends[ends >= width]
        ends_wider = ends_wider[tokens[ends_wider - width] == tokens[-1 - width]]
        if not len(ends_wider):
            break
        ends, width = ends_wider, width + 1
    if not len(ends) or width < SHORTEST:
        return []
    full = ends[ends + limit < len(tokens)]
    begin = int(full[-1] if len(full) else ends[0]) + 1
    return tokens[begin : begin + limit].tolist()
