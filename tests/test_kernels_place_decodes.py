"""Move decode rows to the real places of their sequences, and compare with arrays of a host that knows these places."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gpu_cases import DEVICE
from mambacache.kernels import StateIndices, api, gpu, place_decodes
from mambacache.plan import DECODE_ARRAYS, FOLD, SequenceStep, StepPlan, layout, pad

PAGE = 64


@dataclass
class Case:
    """Hold rows as they were planned and as they are, with the pages of each."""

    planned: list[SequenceStep]
    real: list[SequenceStep]
    pages: list[list[int]]

    @property
    def starts(self) -> list[int]:
        return [step.start for step in self.real]

    def arrays(self, steps: list[SequenceStep], width: int, kv: bool) -> dict[str, np.ndarray]:
        arrays = layout(steps, len(steps), width)
        arrays["query_start_loc"] = np.array([len(steps) * width], np.int32)
        if not kv:
            return arrays
        position = np.zeros((len(steps), width), np.int32)
        slot = np.full((len(steps), width), -1, np.int32)
        for i, (step, pages) in enumerate(zip(steps, self.pages, strict=True)):
            for t in range(arrays["decode_len"][i]):
                position[i, t] = step.start + t
                slot[i, t] = pages[position[i, t] // PAGE] * PAGE + position[i, t] % PAGE
        lengths = [step.start + int(n) for step, n in zip(steps, arrays["decode_len"], strict=True)]
        arrays |= {"positions": position.ravel(), "kv_slot": slot.ravel(), "kv_len": np.array(lengths, np.int32)}
        arrays["block_table"] = np.concatenate(self.pages).astype(np.int32)
        arrays["block_table_start"] = np.cumsum([0, *map(len, self.pages)]).astype(np.int32)
        return arrays


def step(row: int, start: int, tokens: int, src: int, dst: int, log_start: int, late: int = 0) -> SequenceStep:
    return SequenceStep("", 0, row, start, tokens, False, True, src, dst, row + 1, log_start, (), unplaced_by=late)


def random_case(rows: int, width: int, seed: int) -> Case:
    """Return rows of each kind: known rows, some with a dst before their log ends, and late rows."""
    rng, case = random.Random(seed), Case([], [], [])
    for row in range(rows):
        base = rng.randrange(20) * FOLD
        src, block = 3 * row + 1, 3 * row + 2
        if rng.random() < 0.3 or width == 1:
            end = rng.randrange(FOLD)
            tokens = rng.randint(1, min(width, FOLD - end))
            dst = block if end + tokens == FOLD or rng.random() < 0.1 else 0
            real = planned = step(row, base + end, tokens, src, dst, rng.randint(0, end))
        else:
            first = rng.randint(0, FOLD - 2)  # the start of the row before, which has drafts
            before = rng.randint(2, min(width, FOLD - first))
            tokens, accepted, log_start = rng.randint(1, width), rng.randrange(before), rng.randint(0, first)
            could = first + before + tokens >= FOLD
            planned = step(row, base + first + 1, tokens, src, block * could, log_start, before - 1)
            start = first + 1 + accepted
            if start == FOLD:
                real = step(row, base + start, tokens, block, 0, 0)
            else:
                length = min(tokens, FOLD - start)
                real = step(row, base + start, length, src, block * (start + length == FOLD), log_start)
        case.planned.append(planned)
        case.real.append(real)
        case.pages.append(rng.sample(range(1, 1000), 7))
    return case


def check(device: str, rows: int, width: int, seed: int, kv: bool, dtype: torch.dtype = torch.int32) -> None:
    case = random_case(rows, width, seed)
    indices = StateIndices.from_arrays(case.arrays(case.planned, width, kv), device)
    expected = StateIndices.from_arrays(case.arrays(case.real, width, kv), device)
    indices.derived["of the old arrays"] = 1
    every = torch.tensor(case.starts, dtype=dtype, device=device).repeat_interleave(width)
    place_decodes(indices, every[::width], PAGE if kv else None)
    folds = 1 + 5 * int(expected.folds[0])
    assert indices.folds[:folds].tolist() == expected.folds[:folds].tolist()
    others = ("positions", "kv_slot", "kv_len", "block_table") if kv else ()
    for name in (*others, *(name for name in DECODE_ARRAYS if name != "late_len")):
        assert getattr(indices, name).tolist() == getattr(expected, name).tolist(), name
    assert not indices.derived


CASES = [(rows, width, seed) for rows in (1, 5, 300) for width in (1, 2, 4, 8) for seed in range(3)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv", [False, True])
def test_placed_rows_equal_the_rows_of_a_host_that_knows_the_starts(device: str, kv: bool) -> None:
    for rows, width, seed in CASES:
        check(device, rows, width, seed, kv, torch.int64 if seed else torch.int32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_padding_writes_nothing(device: str) -> None:
    """The pages of padding begin behind the last page."""
    rows, width = 5, 4
    case = random_case(rows, width, 0)
    plan = StepPlan(tuple(case.planned), rows, width, case.arrays(case.planned, width, True))
    indices = StateIndices.from_arrays(pad(plan, rows + 3, width).arrays, device)
    expected = case.arrays(case.real, width, True)
    place_decodes(indices, torch.tensor([*case.starts, 0, 0, 0], device=device), PAGE)
    assert indices.kv_slot.tolist() == [*expected["kv_slot"], *[-1] * 3 * width]
    assert indices.kv_len.tolist() == [*expected["kv_len"], 0, 0, 0]


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU itself runs it")
@pytest.mark.parametrize("kv", [False, True])
@pytest.mark.parametrize(("rows", "width", "seed"), [(5, 4, 0), (300, 8, 1), (40, 1, 2)])
def test_interpreted(rows: int, width: int, seed: int, kv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "backend", lambda x: gpu)
    check("cpu", rows, width, seed, kv)


def known(steps: Iterable[SequenceStep]) -> StateIndices:
    rows = list(steps)
    return StateIndices.from_arrays(layout(rows, len(rows)), "cpu")


def test_placed_rows_equal_rows_planned_later() -> None:
    """Rows that add to their logs are further on, and nothing else of them differs."""
    indices, later = (known(step(row, 20 + row + by, 1, row + 1, 0, 2) for row in range(5)) for by in (0, 3))
    place_decodes(indices, torch.arange(23, 28))
    assert all(torch.equal(getattr(indices, name), getattr(later, name)) for name in DECODE_ARRAYS)


def test_padding_rows_stay_padding() -> None:
    indices = StateIndices.decode_buffers(4, 2, "cpu").fill({}, 4)
    place_decodes(indices, torch.tensor([7, 1 << 40, -1, 0]))
    assert not any(getattr(indices, name).any() for name in (*DECODE_ARRAYS, "folds"))


@pytest.mark.parametrize(
    ("starts", "message"),
    [(torch.zeros(2, dtype=torch.int32), "starts"), (torch.zeros(1), "starts is float32")],
)
def test_other_starts_are_refused(starts: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_decodes(known([step(0, 5, 1, 1, 0, 0)]), starts)
