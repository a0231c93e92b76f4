"""Results that must agree in every bit: split prefill, checkpoints, other company in the batch, drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_cases import CHUNK, MAX_DRAFTS, Op, Pool, Recurrence, Row, assert_bitwise, part, random, run_rows
from kernel_ops import EVERY_OP_AND_DTYPE, EVERY_SHAPE, OPS

every_op = pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)


@pytest.fixture
def two_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


@every_op
@pytest.mark.parametrize("context", [0, 128])
def test_prefill_split_at_any_boundary_equals_the_unsplit_run(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype, context: int
) -> None:
    op, length = make(), 300
    inputs = op.inputs(length, dtype)
    pool = Pool(op.state_shape, state_dtype)
    src = pool.take(random(*op.state_shape, seed=9)) if context else 0
    boundaries = range(CHUNK, length, CHUNK)
    checkpoints = {context + b: pool.take() for b in boundaries}
    whole_end = pool.take()
    (whole,) = run_rows(op, pool, [], [(Row(length, src, (whole_end,), context, checkpoints=checkpoints), inputs)])
    for b in boundaries:
        middle, end = pool.take(), pool.take()
        (first,) = run_rows(op, pool, [], [(Row(b, src, (middle,), context), part(inputs, 0, b))])
        (second,) = run_rows(op, pool, [], [(Row(length - b, middle, (end,), context + b), part(inputs, b, length))])
        assert_bitwise(pool.state[middle], pool.state[checkpoints[context + b]])
        assert_bitwise(pool.state[end], pool.state[whole_end])
        assert_bitwise(torch.cat([first, second]), whole)


@every_op
def test_storing_checkpoints_changes_nothing(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    op, length = make(), 300
    inputs = op.inputs(length, dtype)
    pool = Pool(op.state_shape, state_dtype)
    plain, stored = pool.take(), pool.take()
    checkpoints = {b: pool.take() for b in range(CHUNK, length, CHUNK)}
    (without,) = run_rows(op, pool, [], [(Row(length, 0, (plain,)), inputs)])
    (with_all,) = run_rows(op, pool, [], [(Row(length, 0, (stored,), checkpoints=checkpoints), inputs)])
    assert_bitwise(with_all, without)
    assert_bitwise(pool.state[stored], pool.state[plain])


@every_op
def test_a_row_does_not_depend_on_its_batch(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    check_in_company(make(), dtype, state_dtype, (1, 2, 6, 31))


@pytest.mark.parametrize("make", OPS.values(), ids=OPS.keys())
def test_a_row_does_not_depend_on_its_batch_with_two_threads(make: Callable[[], Op], two_threads: None) -> None:
    check_in_company(make(), torch.float32, torch.float32, (6,))


def check_in_company(op: Op, dtype: torch.dtype, state_dtype: torch.dtype, companies: tuple[int, ...]) -> None:
    """A decode row and a prefill row give the same bits alone and at a random place among others."""
    pool = Pool(op.state_shape, state_dtype, blocks=512)
    src = pool.take(random(*op.state_shape, seed=9))
    prompt, tokens = op.inputs(150, dtype, seed=1), op.inputs(3, dtype, seed=2)

    def decode(length: int = 3) -> Row:
        return Row(length, src, tuple(pool.take() for _ in range(length)))

    def prefill(length: int = 150, context: int = 64) -> Row:
        return Row(length, src, (pool.take(),), context)

    alone = decode(), prefill()
    (decoded,) = run_rows(op, pool, [(alone[0], tokens)])
    (prefilled,) = run_rows(op, pool, [], [(alone[1], prompt)])
    rng = np.random.default_rng(5)
    for company in companies:
        place = int(rng.integers(company + 1))
        decodes = [(decode(int(n)), op.inputs(int(n), dtype, seed=30 + int(n))) for n in rng.integers(1, 4, company)]
        prefills = [
            (prefill(int(n), int(rng.integers(90))), op.inputs(int(n), dtype, seed=int(n)))
            for n in rng.integers(1, 200, company)
        ]
        rows = decode(), prefill()
        decodes.insert(place, (rows[0], tokens))
        prefills.insert(place, (rows[1], prompt))
        outputs = run_rows(op, pool, decodes, prefills)
        assert_bitwise(outputs[place], decoded)
        assert_bitwise(outputs[len(decodes) + place], prefilled)
        for row, lone in zip(rows, alone, strict=True):
            for block, wanted in zip(row.dst, lone.dst, strict=True):
                assert_bitwise(pool.state[block], pool.state[wanted])


@pytest.mark.parametrize("make", EVERY_SHAPE.values(), ids=EVERY_SHAPE.keys())
def test_products_of_every_shape_round_alike_in_any_batch(make: Callable[[], Recurrence]) -> None:
    op = make()
    pool = Pool(op.state_shape, torch.float32, blocks=32)
    inputs = op.inputs(70, torch.float32)
    lone = pool.take()
    (wanted,) = run_rows(op, pool, [], [(Row(70, 0, (lone,)), inputs)])
    for count in (2, 3, 9):
        blocks = [pool.take() for _ in range(count)]
        outputs = run_rows(op, pool, [], [(Row(70, 0, (block,)), inputs) for block in blocks])
        for block, output in zip(blocks, outputs, strict=True):
            assert_bitwise(output, wanted)
            assert_bitwise(pool.state[block], pool.state[lone])


class Sequence:
    """A sequence that is decoded one token at a time, as the truth for a run with drafts."""

    def __init__(self, op: Op, pool: Pool, length: int, dtype: torch.dtype, seed: int) -> None:
        self.op, self.pool = op, pool
        self.inputs = op.inputs(length, dtype, seed)
        self.src = self.window_src = pool.take(random(*op.state_shape, seed=seed))
        self.window_offset = self.done = 0
        self.outputs: list[Tensor] = []
        self.states: list[Tensor] = []  # after each token
        src = self.src
        for t in range(length):
            dst = pool.take()
            (y,) = run_rows(op, pool, [(Row(1, src, (dst,)), part(self.inputs, t, t + 1))])
            self.outputs.append(y[0])
            self.states.append(op.final_state(pool.state, dst, dst, 0).clone())
            src = dst

    def check(self, row: Row, outputs: Tensor, accepted: int) -> None:
        op, state = self.op, self.pool.state
        for j in range(accepted):
            assert_bitwise(outputs[j], self.outputs[self.done + j])
        if 0 < row.boundary_index < accepted:  # a complete state in one block
            block = row.dst[row.boundary_index]
            assert_bitwise(op.final_state(state, block, block, 0), self.states[self.done + row.boundary_index])
        self.src, self.window_src, self.window_offset = row.dst[accepted - 1], row.dst[0], accepted - 1
        self.done += accepted
        kept = op.final_state(state, self.src, self.window_src, self.window_offset)
        assert_bitwise(kept, self.states[self.done - 1])


@every_op
def test_drafts_leave_the_state_of_the_sequential_run(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Rows of 1 to 8 tokens, wrong drafts after a random number of right ones, three sequences at different paces."""
    op, length = make(), 24
    pool = Pool(op.state_shape, state_dtype, blocks=1024)
    sequences = [Sequence(op, pool, length, dtype, seed) for seed in (1, 2, 3)]
    rng = np.random.default_rng(0)
    while any(s.done < length for s in sequences):
        width, segments, accepted = int(rng.integers(1, MAX_DRAFTS + 2)), [], []
        for s in sequences:
            count = int(rng.integers(1, width + 1)) if s.done < length else 0
            right = min(count, int(rng.integers(1, width + 1)), length - s.done)
            wrong = op.inputs(count - right, dtype, seed=int(rng.integers(1000)))
            true = part(s.inputs, s.done, s.done + right)
            inputs = {name: torch.cat([value, wrong[name]]) for name, value in true.items()}
            dst = tuple(pool.take() for _ in range(count)) or (0,)
            boundary = int(rng.integers(1, count)) if count > 1 else -1
            source = (s.src, s.window_src, s.window_offset) if count else (0, 0, 0)
            row = Row(count, source[0], dst, conv_src=source[1], conv_offset=source[2], boundary_index=boundary)
            segments.append((row, inputs))
            accepted.append(right)
        outputs = run_rows(op, pool, segments)
        for s, (row, _), y, right in zip(sequences, segments, outputs, accepted, strict=True):
            if right:
                s.check(row, y, right)
