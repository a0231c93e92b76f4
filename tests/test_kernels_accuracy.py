"""Check the recurrent ops' accuracy against their float64 recurrence, over shapes and over hard inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_cases import (
    Inputs,
    Log,
    Op,
    Pool,
    Recurrence,
    Row,
    assert_bitwise,
    part,
    plan_arrays,
    random,
    run_rows,
)
from kernel_ops import EVERY_HARD_CASE, EVERY_SHAPE, OPS, RULERS
from mambacache.kernels import FOLD, StateIndices, reference
from selection import full, some

LENGTH = 150
WORST_TOKEN = 4  # times the error of the fp32 recurrence's worst token


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


Run = Callable[[Recurrence, Pool, int, Inputs], tuple[Tensor, int]]


def run_prefill(op: Recurrence, pool: Pool, src: int, inputs: Inputs) -> tuple[Tensor, int]:
    """Return the outputs, and the block of the state after the last token."""
    dst = pool.take()
    (y,) = run_rows(op, pool, [], [(Row(LENGTH, src, dst, context=40), inputs)])
    return y, dst


def run_decode(op: Recurrence, pool: Pool, src: int, inputs: Inputs) -> tuple[Tensor, int]:
    """Run the recurrence itself: token by token, with a fold after each token."""
    log, dst, outputs = Log(op, pool, next(iter(inputs.values())).dtype), pool.take(), []
    slot = log.take()
    for t in range(LENGTH):
        outputs += run_rows(op, pool, [(Row(1, src, dst, log_slot=slot), part(inputs, t, t + 1))], log=log)
        src = dst
    return torch.cat(outputs), dst


def run_logged(op: Recurrence, pool: Pool, src: int, inputs: Inputs) -> tuple[Tensor, int]:
    """Run over logs of 16 tokens, from position 3, four tokens at a time."""
    log, dst, outputs = Log(op, pool, next(iter(inputs.values())).dtype), pool.take(), []
    slot, position, end, start = log.take(), 3, LENGTH + 3, 3
    while position < end:
        entry = position % FOLD
        count = min(4, FOLD - entry, end - position)
        row = Row(count, src, dst, log_slot=slot, log_start=start, log_end=entry)
        if entry + count < FOLD and position + count < end:
            row.dst = 0
        outputs += run_rows(op, pool, [(row, part(inputs, position - 3, position - 3 + count))], log=log)
        position += count
        if row.dst:
            src, start = dst, 0
    return torch.cat(outputs), dst


def errors(
    op: Recurrence, dtype: torch.dtype, run: Run = run_prefill, device: str = "cpu"
) -> tuple[float, float, float]:
    """Return relative RMS errors: of the outputs, of the final state, and of the worst token's outputs."""
    inputs = op.inputs(LENGTH, dtype)
    pool = Pool(op.state_shape, dtype, blocks=LENGTH + 8, device=device)
    src = pool.take(random(*op.state_shape, seed=7))
    exact, states = op.walk(inputs, pool.state[src].cpu().double())
    y, dst = run(op, pool, src, inputs)
    worst = max(relative_error(*token) for token in zip(y, exact, strict=True))
    return relative_error(y, exact), relative_error(pool.state[dst].cpu(), states[-1]), worst


@pytest.mark.parametrize("make", some(8, EVERY_SHAPE.values()), ids=EVERY_SHAPE.keys())
def test_every_shape(make: Callable[[], Recurrence]) -> None:
    assert max(errors(make(), torch.float32)[:2]) < 3e-6


@pytest.mark.parametrize("make", EVERY_HARD_CASE.values(), ids=EVERY_HARD_CASE.keys())
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), *full((torch.float64, 1e-14))])
def test_hard_inputs(make: Callable[[], Recurrence], dtype: torch.dtype, bound: float) -> None:
    assert max(errors(make(), dtype)[:2]) < bound


@pytest.mark.parametrize("make", some(8, EVERY_SHAPE.values()), ids=EVERY_SHAPE.keys())
def test_every_shape_in_decode(make: Callable[[], Recurrence]) -> None:
    assert max(errors(make(), torch.float32, run_logged)[:2]) < 3e-6


@pytest.mark.parametrize("make", some(12, EVERY_HARD_CASE.values()), ids=EVERY_HARD_CASE.keys())
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), *full((torch.float64, 1e-10))])
def test_hard_inputs_in_decode(make: Callable[[], Recurrence], dtype: torch.dtype, bound: float) -> None:
    """Decays within a log are differences of sums. A token's decay is at least 2^-34.6, which float64 sees."""
    assert max(errors(make(), dtype, run_logged)[:2]) < bound


@pytest.mark.parametrize("make", some(8, EVERY_HARD_CASE.values()), ids=EVERY_HARD_CASE.keys())
def test_chunks_lose_hardly_more_than_the_recurrence(make: Callable[[], Recurrence]) -> None:
    *chunked, worst_of_chunked = errors(make(), torch.float32)
    *recurrent, worst_of_recurrent = errors(make(), torch.float32, run_decode)
    assert all(ours < 2.5 * its for ours, its in zip(chunked, recurrent, strict=True))
    assert worst_of_chunked < WORST_TOKEN * worst_of_recurrent


@pytest.mark.parametrize("make", RULERS.values(), ids=RULERS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_operands_lose_a_few_units_of_their_dtype(make: Callable[[], Recurrence], dtype: torch.dtype) -> None:
    """The precision ruler loses a few units in the last place of the operands, and nothing in fp32."""
    op = make()
    inputs = {name: value.float() for name, value in op.inputs(LENGTH, dtype).items()}  # fp32, so that outputs are too
    expected, states = op.walk(inputs, torch.zeros(op.state_shape, dtype=torch.float64))
    errors = {}
    for operand_dtype in (None, torch.float32, dtype):
        pool = Pool(op.state_shape, torch.float32)
        dst = pool.take()
        indices = StateIndices.from_arrays(plan_arrays([], [Row(LENGTH, 0, dst)]), "cpu")
        y = op.run(inputs, pool.state, (), indices, library=reference, operand_dtype=operand_dtype)
        errors[operand_dtype] = relative_error(y, expected), relative_error(pool.state[dst], states[-1])
    assert errors[None] == errors[torch.float32] and max(errors[None]) < 1e-6
    unit = torch.finfo(dtype).eps
    assert unit / 16 < min(errors[dtype]) and max(errors[dtype]) < unit


@pytest.mark.parametrize("make", OPS.values(), ids=OPS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, *full(torch.bfloat16)])
def test_strided_views_give_the_same(make: Callable[[], Op], dtype: torch.dtype) -> None:
    """Pass all inputs as slices of one wide tensor, as a projection or the convolution returns them."""
    op = make()
    pool = Pool(op.state_shape, dtype if op.exact_state else torch.float32)
    inputs = op.inputs(LENGTH, dtype)
    wide = torch.cat([torch.zeros(LENGTH, 1, dtype=dtype), *(value.flatten(1) for value in inputs.values())], dim=1)
    slices = wide.split([1, *(value[0].numel() for value in inputs.values())], dim=1)[1:]
    views = {name: view.view(inputs[name].shape) for name, view in zip(inputs, slices, strict=True)}
    log = Log(op, pool, dtype)
    blocks, slots, outputs = [pool.take(), pool.take()], [log.take(), log.take()], []
    for tokens, block, slot in zip((inputs, views), blocks, slots, strict=True):
        arrays = plan_arrays([Row(1, 0, pool.take(), log_slot=slot)], [Row(LENGTH - 1, 0, block)])
        outputs.append(op.run(tokens, pool.state, log.tensors, StateIndices.from_arrays(arrays, "cpu")))
    assert_bitwise(*outputs)
    assert_bitwise(*pool.state[blocks])
    for tensor in log.tensors:
        assert_bitwise(*tensor[slots])
