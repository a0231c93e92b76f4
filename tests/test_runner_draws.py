"""Check which random bits and parameters each draw of a step gets, in any order of the draws."""

from __future__ import annotations

from array import array

import numpy as np
import torch

from mambacache.config import SamplingParams
from mambacache.plan import PLACEHOLDER, SequenceStep, build_plan
from mambacache.runner.adjustments import Adjustment
from mambacache.runner.device_batch import DeviceBatch
from mambacache.runner.sampler import RowSampling, random_bits

PARAMS = [
    SamplingParams(top_p=0.5),
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=7),
    SamplingParams(min_p=0.2),
    SamplingParams(top_k=3),
]
START, WIDTH = 20, 3


def adjustment(token: int) -> Adjustment:
    return Adjustment(np.array([token]), *np.zeros((3, 1), np.float32))


def test_draws_of_rows_that_may_be_late() -> None:
    steps = [
        SequenceStep(
            str(i),
            i,
            i + 1,
            START,
            WIDTH,
            False,
            True,
            1 + i,
            20 + i,
            1 + i,
            4,
            (PLACEHOLDER,) * (WIDTH - 1),
            unplaced_by=3,
        )
        for i in range(len(PARAMS))
    ]
    plan = build_plan(steps, [array("i", [PLACEHOLDER] * WIDTH)] * len(steps), None, 64)
    sampling = [
        RowSampling(params, (100 + i,), (), [adjustment(10 * i + j) for j in range(WIDTH)] if i % 2 == 0 else ())
        for i, params in enumerate(PARAMS)
    ]
    batch, late = DeviceBatch.build(plan, sampling, "cpu", {}), [0, 1, 2, 3, 1, 2]
    assert [size for size, _ in batch.draw_groups] == [6, 6, 3]  # of all tokens, of the top_k, sorted
    batch.draw_late(torch.tensor(late))
    assert batch.late_bits is not None and batch.draw_row is not None and batch.adjustments is not None
    temperature, top_p, min_p = batch.draw_parameters[:3].view(torch.float32).tolist()
    top_k, bits = batch.draw_parameters[3:].tolist()
    for draw, (sample, row) in enumerate(zip(batch.draw_index.tolist(), batch.draw_row.tolist(), strict=True)):
        at, place = divmod(sample, WIDTH)
        assert row == at
        first = START + place + 1
        assert batch.late_bits[draw].tolist() == random_bits([100 + row] * 8, range(first, first + 8)).tolist()
        assert bits[draw] == random_bits([100 + row], [first + late[row]])[0]
        asked = [temperature[draw], np.float32(top_p[draw]), top_k[draw], np.float32(min_p[draw])]
        params = PARAMS[row]
        assert asked == [params.temperature, np.float32(params.top_p), params.top_k, np.float32(params.min_p)]
    for draw, changed in batch.adjustments.draws.T.tolist():
        assert batch.draw_index[draw] == batch.adjustments.samples[changed]
    assert {*batch.draw_index.tolist()} == {*range(WIDTH * len(PARAMS))} - {3, 4, 5}
