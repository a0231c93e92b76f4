"""Check the drafts that the device makes from a request's own tokens, and the histories that it keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mambacache.kernels import StateIndices, add_to_history, draft_from_history, gpu, ngrams
from mambacache.kernels.reference.ngrams import LONGEST, OPEN, SHORTEST
from selection import full

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
    "far back": ([1, 2, 3, 4, 8, 9, *range(100, 9000), 1, 2, 3, 4], 2, [8, 9]),
    "across tiles of a search": ([*range(100, 4194), 1, 2, 3, 4, 8, 9, *range(4200, 5000), 1, 2, 3, 4], 2, [8, 9]),
    "a short one first, then a longer": ([1, 2, 3, 4, 8, 9, *range(100, 9000), 5, 3, 4, 6, 1, 2, 3, 4], 2, [8, 9]),
}


@pytest.fixture(params=["reference", *full("interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the ops in plain torch, in the GPU's kernels in Triton's interpreter, or on the GPU."""
    if request.param == "interpreted":
        if torch.cuda.is_available():
            pytest.skip("the GPU itself runs them")
        monkeypatch.setattr(ngrams, "backend", lambda x: gpu)
    return "cuda" if request.param == "cuda" else "cpu"


@pytest.mark.parametrize(("tokens", "limit", "expected"), CASES.values(), ids=CASES)
def test_follow(device: str, tokens: list[int], limit: int, expected: list[int]) -> None:
    assert followed([tokens], limit, device) == [expected]


def step(rows: list[list[int]], lengths: list[int], late: list[int], positions: list[int], device: str) -> StateIndices:
    """Return a step of these tokens: row i has `lengths[i]` real tokens and uses log i + 1, without a dst."""
    width, count = len(rows[0]), len(rows)
    arrays = dict.fromkeys(("decode_src", "decode_dst", "log_start", "log_end"), np.zeros(count, np.int32))
    arrays["log_slot"] = np.arange(1, count + 1, dtype=np.int32)
    arrays |= {"decode_len": np.array(lengths, np.int32), "late_len": np.array(late, np.int32)}
    arrays |= {"tokens": np.array(rows, np.int32).ravel(), "query_start_loc": np.array([count * width], np.int32)}
    arrays["positions"] = np.repeat(np.array(positions, np.int32), width)
    return StateIndices.from_arrays(arrays, device)


def histories_of(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Return histories of tokens other than 0. Behind a row's tokens anything may stand."""
    room = max(map(len, rows)) + 16
    held = [[0] * room, *([*row, *row[:1] * room][:room] for row in rows)]
    return torch.tensor(held, dtype=torch.int32, device=device), torch.tensor([1, *map(len, rows)], device=device)


def followed(rows: list[list[int]], limit: int, device: str = "cpu") -> list[list[int]]:
    drafts = [[row[-1], *[OPEN] * limit] for row in rows]
    indices = step(drafts, [limit + 1] * len(rows), [0] * len(rows), [len(row) - 1 for row in rows], device)
    draft_from_history(indices, *histories_of(rows, device))
    found = indices.tokens.view(len(rows), limit + 1).tolist()
    assert [first for first, *_ in found] == [row[-1] for row in rows]
    return [[token for token in row if token] for _, *row in found]


def plainly(tokens: list[int], limit: int) -> list[int]:
    for width in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        begins = [i for i in range(width, len(tokens)) if tokens[i - width : i] == tokens[-width:]]
        if begins:
            full = [i for i in begins if i + limit <= len(tokens)]
            begin = full[-1] if full else begins[0]
            return tokens[begin : begin + limit]
    return []


def test_follow_equals_a_plain_search(device: str) -> None:
    rng, found = random.Random(0), 0
    for _ in range(40):
        rows, limit = [rng.choices(range(1, 5), k=rng.randrange(1, 30)) for _ in range(10)], rng.randrange(1, 8)
        expected = [plainly(row, limit) for row in rows]
        assert followed(rows, limit, device) == expected
        found += sum(map(bool, expected))
    assert found > 100


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_histories_grow_by_accepted_tokens(device: str, width: int) -> None:
    """Check rows of every kind, padding too. Some are late, and have drafts that the host made."""
    rng = random.Random(width)
    texts = [rng.choices(range(1, 4), k=rng.randrange(2, 60)) for _ in range(40)]
    lengths = [rng.randint(1, width) for _ in texts]
    late_len = [rng.choice([0, length]) if width > 1 else 0 for length in lengths]
    late = [rng.randrange(min(width, len(text))) if most else 0 for most, text in zip(late_len, texts, strict=True)]
    rows = [[OPEN if by else text[-1]] for by, text in zip(late_len, texts, strict=True)]
    rows = [[*row, *(rng.choice([OPEN, 1, 2, 3]) for _ in range(width - 1))] for row in rows]
    positions = [len(text) - 1 - by for text, by in zip(texts, late, strict=True)]
    indices = step([*rows, [0] * width], [*lengths, 0], [*late_len, 0], [*positions, 0], device)
    indices.log_slot[-1] = 0
    histories, held = histories_of(texts, device)

    starts, by, first_sample = draft_from_history(indices, histories, held)
    assert starts.tolist() == [*(len(text) - 1 for text in texts), 0] and by.tolist() == [*late, 0]
    assert first_sample.tolist() == [sum(lengths[:i]) for i in range(len(texts) + 1)]
    drafted = indices.tokens.view(-1, width).tolist()
    for text, row, given in zip(texts, rows, drafted, strict=False):
        expected = [*plainly(text, width - 1), *[0] * width][: width - 1]
        assert given[0] == text[-1]
        assert given[1:] == [new if old == OPEN else old for old, new in zip(row[1:], expected, strict=True)]

    sampled = [rng.choice([1, 2, 3, -1]) for _ in range(sum(lengths))]
    counts = add_to_history(indices, first_sample, torch.tensor(sampled, device=device), histories, held)
    assert counts[-1] == 1 and held[0] == 1
    for i, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        given = [max(token, 0) for token in sampled[sum(lengths[:i]) :][:length]]
        right = next((j for j in range(length - 1) if drafted[i][1 + j] != given[j]), length - 1)
        assert counts[i] == right + 1 and held[i + 1] == len(text) + right + 1
        assert histories[i + 1, : held[i + 1]].tolist() == [*text, *given[: right + 1]]


FITTING = torch.zeros(2, 9, dtype=torch.int32), torch.ones(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (draft_from_history, (torch.zeros(2, 9), FITTING[1]), "histories is float32 where int32"),
        (draft_from_history, (FITTING[0], torch.ones(3, dtype=torch.int64)), "lengths has shape"),
        (draft_from_history, (FITTING[0], FITTING[1].int()), "lengths is int32 where int64"),
        (draft_from_history, (FITTING[0].T.contiguous().T, FITTING[1]), "must be contiguous"),
        (add_to_history, (torch.zeros(2).long(), torch.zeros(1).long(), *FITTING), "first_sample has shape"),
        (add_to_history, (torch.zeros(1).long(), torch.zeros(1), *FITTING), "sampled is float32"),
        (add_to_history, (torch.zeros(1).long(), torch.zeros(4).long()[::2], *FITTING), "must be contiguous"),
    ],
)
def test_errors(op: Callable[..., Any], arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op(step([[1]], [1], [0], [0], "cpu"), *arguments)
