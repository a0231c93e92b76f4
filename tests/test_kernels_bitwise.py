"""Check results that must agree in every bit: split prefill, checkpoints, other rows in the batch, drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_cases import CHUNK, Inputs, Log, Op, Pool, Recurrence, Row, assert_bitwise, bits, part, random, run_rows
from kernel_ops import EVERY_OP_AND_DTYPE, EVERY_SHAPE, OPS
from mambacache.kernels import FOLD
from selection import some

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
    (whole,) = run_rows(op, pool, [], [(Row(length, src, whole_end, context, checkpoints=checkpoints), inputs)])
    for b in boundaries:
        middle, end = pool.take(), pool.take()
        (first,) = run_rows(op, pool, [], [(Row(b, src, middle, context), part(inputs, 0, b))])
        (second,) = run_rows(op, pool, [], [(Row(length - b, middle, end, context + b), part(inputs, b, length))])
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
    (without,) = run_rows(op, pool, [], [(Row(length, 0, plain), inputs)])
    (with_all,) = run_rows(op, pool, [], [(Row(length, 0, stored, checkpoints=checkpoints), inputs)])
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
    """Compare a decode row and a prefill row alone and at a random place among other rows."""
    pool = Pool(op.state_shape, state_dtype, blocks=512)
    log = Log(op, pool, dtype, 512)
    start = random(*op.state_shape, seed=9)
    src = pool.take(start)
    prompt, tokens = op.inputs(150, dtype, seed=1), op.inputs(3, dtype, seed=2)
    logged = op.inputs(FOLD, dtype, seed=3)
    entries, (_, states) = op.entries(logged, start), op.walk(logged, start)

    def decode(length: int = 3, first: int = 2, end: int = 9) -> Row:
        slot = log.take([each[: end - first] for each in entries], first, states, drafts=2)
        return Row(length, src, pool.take(), log_slot=slot, log_start=first, log_end=end)

    def prefill(length: int = 150, context: int = 64) -> Row:
        return Row(length, src, pool.take(), context)

    alone = decode(), prefill()
    (decoded,) = run_rows(op, pool, [(alone[0], tokens)], log=log)
    (prefilled,) = run_rows(op, pool, [], [(alone[1], prompt)])
    rng = np.random.default_rng(5)
    for company in companies:
        place = int(rng.integers(company + 1))
        decodes = [
            (decode(int(n), int(first), int(first + n)), op.inputs(int(n), dtype, seed=30 + int(n)))
            for n, first in zip(rng.integers(1, 4, company), rng.integers(0, 10, company), strict=True)
        ]
        prefills = [
            (prefill(int(n), int(rng.integers(90))), op.inputs(int(n), dtype, seed=int(n)))
            for n in rng.integers(1, 200, company)
        ]
        rows = decode(), prefill()
        decodes.insert(place, (rows[0], tokens))
        prefills.insert(place, (rows[1], prompt))
        outputs = run_rows(op, pool, decodes, prefills, log=log)
        assert_bitwise(outputs[place], decoded)
        assert_bitwise(outputs[len(decodes) + place], prefilled)
        for row, lone in zip(rows, alone, strict=True):
            assert_bitwise(pool.state[row.dst], pool.state[lone.dst])
        for tensor, lone in zip(*(log.held(row.log_slot, 2, 12) for row in (rows[0], alone[0])), strict=True):
            assert_bitwise(tensor, lone)


@pytest.mark.parametrize("make", some(8, EVERY_SHAPE.values()), ids=EVERY_SHAPE.keys())
def test_products_of_every_shape_round_alike_in_any_batch(make: Callable[[], Recurrence]) -> None:
    op = make()
    pool = Pool(op.state_shape, torch.float32, blocks=32)
    inputs = op.inputs(70, torch.float32)
    lone = pool.take()
    (wanted,) = run_rows(op, pool, [], [(Row(70, 0, lone), inputs)])
    for count in (2, 3, 9):
        blocks = [pool.take() for _ in range(count)]
        outputs = run_rows(op, pool, [], [(Row(70, 0, block), inputs) for block in blocks])
        for block, output in zip(blocks, outputs, strict=True):
            assert_bitwise(output, wanted)
            assert_bitwise(pool.state[block], pool.state[lone])


class Sequence:
    """Decode a sequence from position `start`, where its first state stands."""

    def __init__(self, op: Op, pool: Pool, log: Log, inputs: Inputs, start: int, state: Tensor) -> None:
        self.op, self.pool, self.log, self.inputs = op, pool, log, inputs
        self.start = self.position = start
        self.length = len(next(iter(inputs.values())))
        self.src, self.spare, self.slot = pool.take(state), pool.take(), log.take()
        self.log_start = start % FOLD
        self.outputs: list[Tensor] = []
        self.kept: list[list[Tensor]] = []  # the state and the log of every fold

    @property
    def left(self) -> int:
        return self.start + self.length - self.position

    def row(self, count: int, right: int, seed: int) -> tuple[Row, Inputs]:
        """Return a row of up to `count` tokens: at most `right` right tokens, and then wrong drafts."""
        entry, done = self.position % FOLD, self.position - self.start
        count = min(count, FOLD - entry)
        self.right = min(count, right, self.left)
        dst = self.spare if entry + count == FOLD else 0
        inputs = part(self.inputs, done, done + self.right)
        if count > self.right:
            wrong = self.op.inputs(count - self.right, next(iter(inputs.values())).dtype, seed)
            inputs = {name: torch.cat([value, wrong[name]]) for name, value in inputs.items()}
        return Row(count, self.src, dst, log_slot=self.slot, log_start=self.log_start, log_end=entry), inputs

    def accept(self, outputs: Tensor) -> None:
        self.outputs.append(outputs[: self.right])
        self.position += self.right
        if self.right and self.position % FOLD == 0:
            self.src, self.spare = self.spare, self.src
            self.note()
            self.log_start = 0
        elif not self.left:
            self.note(self.position % FOLD)

    def note(self, end: int = FOLD) -> None:
        self.kept.append([bits(self.pool.state[self.src]).clone()])
        self.kept[-1] += [bits(pool.state[self.slot, self.log_start : end]).clone() for pool in self.log.of_entries]

    def assert_same(self, other: Sequence) -> None:
        assert_bitwise(torch.cat(self.outputs), torch.cat(other.outputs))
        for mine, its in zip(self.kept, other.kept, strict=True):
            for one, another in zip(mine, its, strict=True):
                assert torch.equal(one, another)


@every_op
def test_steps_and_drafts_change_no_bit(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype, length: int = 40
) -> None:
    """Rows of 1 to 8 tokens have wrong drafts after a random number of right tokens, in three sequences at different
    paces.

    Outputs, folds and logs must equal a run of one token at a time.
    """
    op = make()
    pool = Pool(op.state_shape, state_dtype)
    log = Log(op, pool, dtype)
    state, starts = random(*op.state_shape, seed=9), (0, 5, 15)
    inputs = [op.inputs(length, dtype, seed) for seed in range(len(starts))]
    plain, drafted = (
        [Sequence(op, pool, log, *each, state) for each in zip(inputs, starts, strict=True)] for _ in range(2)
    )
    rng = np.random.default_rng(0)
    for sequences, most in ((plain, 1), (drafted, 8)):
        while any(s.left for s in sequences):
            running = [s for s in sequences if s.left]
            rows = [s.row(*map(int, rng.integers(1, most + 1, 2)), int(rng.integers(1000))) for s in running]
            for s, outputs in zip(running, run_rows(op, pool, rows, log=log), strict=True):
                s.accept(outputs)
    for one, other in zip(plain, drafted, strict=True):
        one.assert_same(other)
        assert len(one.kept) > length // FOLD
