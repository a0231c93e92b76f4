"""Run batches of more rows, or more chunks, than the 65,535 places of a grid's second and third axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from gpu_cases import DEVICE, DTYPES, SAMPLES, Dtypes, Make, move_parameters
from kernel_cases import Inputs, Log, Op, Pool, Row, assert_bitwise, part, plan_arrays, random
from mambacache.kernels import StateIndices
from op_conv1d import Conv1dOp
from op_gated_delta_rule import DeltaRuleOp
from op_kda import KDAOp
from op_selective_scan import SelectiveScanOp
from op_ssd import SsdOp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled"), pytest.mark.xdist_group("memory 0")]

NARROW: dict[str, Make] = {
    "conv1d": partial(Conv1dOp, dim=16),
    "gated_delta_rule": partial(DeltaRuleOp, 1, 1, 16, 16),
    "kda": partial(KDAOp, 1, 16, 16),
    "ssd": partial(SsdOp, 1, 1, 16, 16),
    "selective_scan": partial(SelectiveScanOp, 16),
}
# The length of every row, and whether the rows decode. Half of the rows stay below the limit.
BATCHES = {
    "decode rows": ([1] * 65_600, True),
    "short sequences": ([1] * 65_600, False),
    "long sequences": ([8_201 * 64] * 8, False),
}


def run(op: Op, rows: Sequence[Row], decode: bool, inputs: Inputs, state: Tensor, log: Sequence[Tensor]) -> Tensor:
    arrays = plan_arrays(rows, []) if decode else plan_arrays([], rows)
    return op.run(inputs, state, log, StateIndices.from_arrays(arrays, state.device))


@pytest.mark.parametrize(("lengths", "decode"), BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(("make", "dtypes"), [(make, DTYPES[op][0]) for op, make in NARROW.items()], ids=NARROW)
def test_a_batch_equals_its_halves(make: Make, dtypes: Dtypes, lengths: list[int], decode: bool) -> None:
    op = make()
    move_parameters(op)
    pool = Pool(op.state_shape, dtypes[1], blocks=len(lengths) + 2, device=DEVICE)
    log = Log(op, pool, dtypes[0], len(lengths) + 1 if decode else 1)
    sources = 0, pool.take(random(*op.state_shape, seed=1))
    rows = [
        Row(n, sources[i % 2], pool.take(), 64 * (i % 2), log_slot=log.take() if decode else 0)
        for i, n in enumerate(lengths)
    ]
    drawn = torch.arange(sum(lengths), device=DEVICE) % SAMPLES
    inputs = {name: x.to(DEVICE)[drawn] for name, x in op.inputs(SAMPLES, dtypes[0]).items()}
    halves = [pool.slab.clone(), *log.slabs()]

    whole = run(op, rows, decode, inputs, pool.state, log.tensors)

    middle, tokens = len(rows) // 2, sum(lengths[: len(rows) // 2])
    views = pool.view(halves[0]), log.views(halves[1:])
    first = run(op, rows[:middle], decode, part(inputs, 0, tokens), *views)
    second = run(op, rows[middle:], decode, part(inputs, tokens, len(whole)), *views)
    assert whole.any() and not whole.isnan().any()
    assert_bitwise(torch.cat([first, second]), whole)
    for half, slab in zip(halves, (pool.slab, *log.slabs()), strict=True):
        assert_bitwise(half, slab)
