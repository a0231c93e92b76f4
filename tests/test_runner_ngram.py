"""What the device drafts of a request's own tokens."""

from __future__ import annotations

import random

import pytest
import torch

from mambacache.runner.ngram import LONGEST, SHORTEST, follow

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
    assert followed([tokens], limit) == [expected]


def followed(rows: list[list[int]], limit: int) -> list[list[int]]:
    """Of rows of tokens, none of them 0, behind which anything may stand."""
    longest = max(map(len, rows)) + 2
    tokens = torch.tensor([[*row, *row[:1] * (longest - len(row))] for row in rows], dtype=torch.int32)
    found = follow(tokens, torch.tensor([len(row) - 1 for row in rows]), limit)
    assert found.shape == (len(rows), limit) and found.dtype == torch.int32
    return [[token for token in row if token] for row in found.tolist()]


def plainly(tokens: list[int], limit: int) -> list[int]:
    for width in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        begins = [i for i in range(width, len(tokens)) if tokens[i - width : i] == tokens[-width:]]
        if begins:
            full = [i for i in begins if i + limit <= len(tokens)]
            begin = full[-1] if full else begins[0]
            return tokens[begin : begin + limit]
    return []


def test_follow_is_what_a_plain_search_finds() -> None:
    rng, found = random.Random(0), 0
    for _ in range(200):
        rows, limit = [rng.choices(range(1, 5), k=rng.randrange(1, 30)) for _ in range(10)], rng.randrange(1, 8)
        expected = [plainly(row, limit) for row in rows]
        assert followed(rows, limit) == expected
        found += sum(map(bool, expected))
    assert found > 500
