"""What prompt lookup proposes."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from mambacache import SamplingParams
from mambacache.scheduler.ngram import LONGEST, SHORTEST, PromptLookup, follow
from mambacache.scheduler.request import Request

CASES = {
    "nothing before": ([1, 2, 3, 4], 3, []),
    "one token alone is no match": ([5, 1, 2, 5], 3, []),
    "what followed": ([1, 2, 3, 4, 5, 9, 1, 2], 3, [3, 4, 5]),
    "no more than asked for": ([1, 2, 3, 4, 5, 9, 1, 2], 1, [3]),
    "the longer match": ([7, 1, 2, 3, 8, 9, 8, 1, 2, 4, 8, 9, 7, 1, 2], 2, [3, 8]),
    "the latest of equal ones": ([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], 2, [5, 6]),
    "an earlier one that has enough": ([1, 2, 3, 4, 1, 2, 1, 2], 3, [3, 4, 1]),
    "as much as there is": ([1, 1, 1], 3, [1]),
    "a run goes on": ([4, *[1] * 9], 3, [1, 1, 1]),
    "one token": ([1], 3, []),
}


@pytest.mark.parametrize(("tokens", "limit", "expected"), CASES.values(), ids=CASES)
def test_follow(tokens: list[int], limit: int, expected: list[int]) -> None:
    assert follow(np.array(tokens, np.int32), limit) == expected


def plainly(tokens: list[int], limit: int) -> list[int]:
    for width in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        begins = [i for i in range(width, len(tokens)) if tokens[i - width : i] == tokens[-width:]]
        if begins:
            full = [i for i in begins if i + limit <= len(tokens)]
            begin = full[-1] if full else begins[0]
            return tokens[begin : begin + limit]
    return []


def test_follow_is_what_a_plain_search_finds() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(2000):
        tokens, limit = rng.choices(range(4), k=rng.randrange(1, 30)), rng.randrange(1, 8)
        assert follow(np.array(tokens, np.int32), limit) == plainly(tokens, limit)
        found += bool(plainly(tokens, limit))
    assert found > 500


def test_an_answer_is_known_as_it_grows_and_forgotten_with_its_request() -> None:
    lookup, request = PromptLookup(), Request("a", [1, 2, 3, 4], SamplingParams())
    assert lookup(request, 2) == []
    request.output += [1, 2]
    assert lookup(request, 2) == [3, 4] == lookup(request, 2)
    request.output += [3, 9, 2, 3]
    assert lookup(request, 2) == [9, 2]
    del request
    gc.collect()
    assert not lookup._known


def test_a_search_that_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps the exception keeps what was searched: the answer is known as it grows all the same."""
    lookup, request = PromptLookup(), Request("a", [1, 2, 3, 1, 2], SamplingParams())
    flatnonzero = np.flatnonzero

    def interrupted(array: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "flatnonzero", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        lookup(request, 1)
    monkeypatch.setattr(np, "flatnonzero", flatnonzero)
    request.output += [3]
    assert lookup(request, 1) == [1] and kept
