"""Check the reads and writes of every recurrent op, in pools full of NaN, against a token-by-token float64 oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_cases import Inputs, Log, Op, Pool, Row, assert_bitwise, bits, part, random, run_rows
from kernel_ops import EVERY_HARD_CASE, EVERY_OP_AND_DTYPE, OPS
from mambacache.kernels import FOLD
from selection import full

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def held(pool: Pool, count: int) -> list[int]:
    """Return blocks with a finite state in each."""
    return [pool.take(random(*pool.shape[1:], seed=50 + i)) for i in range(count)]


class Scene:
    """Hold rows of a batch over a pool and a token log full of NaN, and the oracle's results for them."""

    def __init__(
        self, op: Op, dtype: torch.dtype, state_dtype: torch.dtype, blocks: int = 128, slots: int = 32
    ) -> None:
        self.op, self.dtype = op, dtype
        self.pool = Pool(op.state_shape, state_dtype, blocks=blocks)
        self.log = Log(op, self.pool, dtype, slots)
        self.shared, self.other = held(self.pool, 2)
        self.decodes: list[tuple[Row, Inputs]] = []
        self.prefills: list[tuple[Row, Inputs]] = []
        self.outputs: list[Tensor] = []  # decode rows first, then prefill rows
        self.states: dict[int, Tensor] = {}
        self.entries: list[tuple[Tensor, ...]] = []  # of every decode row's tokens
        self.carried: list[Tensor | None] = []  # the state after the first of these tokens

    def state(self, src: int) -> Tensor:
        zeros = torch.zeros(self.op.state_shape, dtype=torch.float64)
        return self.pool.state[src].cpu().double() if src else zeros

    def decode(self, length: int, src: int, start: int = 0, end: int = 0, dst: int = 0, width: int = 1) -> Row:
        """Add a row with a token log that holds tokens in its entries from `start` to `end`."""
        logged, S = end - start, self.state(src)
        inputs = self.op.inputs(logged + length, self.dtype, seed=len(self.decodes))
        entries = self.op.entries(inputs, S)
        outputs, states = self.op.walk(inputs, S)
        slot = self.log.take([each[:logged] for each in entries], start, states, drafts=len(self.decodes) % 8)
        row = Row(length, src, dst, log_slot=slot, log_start=start, log_end=end, width=width)
        if row.target:
            self.states[dst] = states[-1]
        self.decodes.append((row, part(inputs, logged, logged + length)))
        self.outputs.insert(len(self.decodes) - 1, outputs[logged:])
        self.entries.append(tuple(each[logged:] for each in entries))
        self.carried.append(states[logged] if length else None)
        return row

    def prefill(
        self, length: int, src: int = 0, dst: int = 0, context: int = 0, checkpoints: dict[int, int] | None = None
    ) -> None:
        row = Row(length, src, dst, context, checkpoints or {})
        inputs = self.op.inputs(length, self.dtype, seed=20 + len(self.prefills))
        outputs, states = self.op.walk(inputs, self.state(src))
        self.states |= {block: states[count - 1] for count, block in row.stored.items()}
        self.prefills.append((row, inputs))
        self.outputs.append(outputs)

    def check(self) -> None:
        """Run the rows, and check that all results of the oracle are there and nothing else was written."""
        slab, slabs, dtype = self.pool.slab.clone(), self.log.slabs(), self.dtype
        outputs = run_rows(self.op, self.pool, self.decodes, self.prefills, tail=5, log=self.log)
        for actual, wanted in zip(outputs, self.outputs, strict=True):
            torch.testing.assert_close(actual.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        tolerance = 0 if self.op.exact_state else max(TOLERANCE[self.pool.slab.dtype], 1e-11)
        for block, wanted in self.states.items():
            state = self.pool.state[block].cpu().double()
            torch.testing.assert_close(state, wanted, atol=tolerance, rtol=tolerance)
        self.check_entries()
        self.pool.assert_only_written(slab, [*self.states])
        self.log.assert_only_written(slabs, [row for row, _ in self.decodes])

    def check_entries(self, fp32_tolerance: float = 1e-5) -> None:
        """Check the entries that tokens have logged: each is a copy, or was computed in fp32 at least."""
        for (row, _), entries, state in zip(self.decodes, self.entries, self.carried, strict=True):
            carried = () if state is None or not self.log.carried else (state, torch.tensor(row.log_end + 1.0).double())
            held = self.log.held(row.log_slot, row.log_end, row.log_end + row.length)
            for tensor, wanted in zip(held, (*entries, *carried), strict=row.length > 0):
                found = tensor.cpu().double()
                tolerance = 1e-11 if tensor.dtype == torch.float64 else fp32_tolerance
                torch.testing.assert_close(found, wanted.expand_as(found), atol=tolerance, rtol=tolerance)


def mixed_batch(op: Op, dtype: torch.dtype, state_dtype: torch.dtype, width: int) -> Scene:
    """Return a scene with every kind of row that a plan may hold, with `width` tokens per decode row."""
    scene = Scene(op, dtype, state_dtype)
    take, shared, other = scene.pool.take, scene.shared, scene.other
    in_place, full_in_place = held(scene.pool, 2)
    last = FOLD - width

    scene.decode(width, shared)
    scene.decode(width, shared, 3, 7)
    scene.decode(width, shared, 0, last, dst=take())  # up to the log's end
    scene.decode(width, full_in_place, 5, last, dst=full_in_place)
    scene.decode(width, in_place, 2, 3, dst=in_place)
    scene.decode(1, 0, dst=take())  # a prompt of one token
    scene.decode(1, other, 15, 15, dst=take())
    scene.decode(1, other, 0, 15, dst=take())
    scene.decode(0, other, 4, 9, dst=take())  # padding stores nothing, whatever its dst says
    scene.decode(width, 0, 6, 8)
    scene.decode(width, 0, 2, 5, dst=take())
    scene.decode(1, shared, 1, 2, dst=take())
    scene.decode(1, other, 0, 11)
    scene.decodes.append((Row(0), op.inputs(0, dtype)))
    scene.outputs.append(torch.zeros_like(scene.outputs[0][:0]))
    scene.entries.append(tuple(each[:0] for each in scene.entries[0]))
    scene.carried.append(None)

    scene.prefill(1, shared, take(), context=64)
    scene.prefill(2, 0, take())
    scene.prefill(3, other, take(), context=62, checkpoints={64: take()})
    scene.prefill(0)
    scene.prefill(200, shared, take(), context=37, checkpoints={64: take(), 192: take()})
    scene.prefill(64, other, take(), context=128)
    scene.prefill(70, shared, context=1)
    scene.prefill(130, 0, take(), checkpoints={64: take(), 128: take()})
    return scene


@pytest.mark.parametrize("width", [*full(1), 4])
@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_mixed_batch_reads_and_writes_as_planned(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype, width: int
) -> None:
    mixed_batch(make(), dtype, state_dtype, width).check()


@pytest.mark.parametrize("make", OPS.values(), ids=OPS.keys())
def test_every_window_of_a_log(
    make: Callable[[], Op],
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    step: int = 1,
) -> None:
    """Log 1 to 8 tokens behind each window, with a dst at some of its ends, whether or not the log is full there."""
    scene, rng = Scene(make(), dtype, state_dtype, 256, 160), np.random.default_rng(0)
    for start in range(0, FOLD, step):
        for end in range(start, FOLD, step):
            length = int(rng.integers(1, min(8, FOLD - end) + 1))
            src = (0, scene.shared, scene.other)[rng.integers(3)]
            scene.decode(length, src, start, end, scene.pool.take() if rng.random() < 0.5 else 0, width=8)
    scene.check()


@pytest.mark.parametrize("make", EVERY_HARD_CASE.values(), ids=EVERY_HARD_CASE.keys())
def test_logs_of_hard_inputs(make: Callable[[], Op]) -> None:
    """Sums of decays stay small however strong the decays are, so their differences lose little."""
    scene = Scene(make(), torch.float32, torch.float32)
    for start, end, length in ((0, 0, 8), (0, 8, 8), (3, 9, 4), (15, 15, 1)):
        scene.decode(length, scene.shared, start, end)
    run_rows(scene.op, scene.pool, scene.decodes, log=scene.log)
    scene.check_entries(1e-4)


@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_src_survives_while_its_dst_is_written_elsewhere(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Many rows resume from one block. It stays bitwise the same, and equal rows get equal states."""
    op = make()
    pool = Pool(op.state_shape, state_dtype)
    log = Log(op, pool, dtype)
    (shared,) = held(pool, 1)
    inputs, tokens = op.inputs(70, dtype), op.inputs(3, dtype)
    blocks = [pool.take() for _ in range(8)]
    kept = pool.state[shared].clone()
    decodes = [(Row(3, shared, block, log_slot=log.take()), tokens) for block in blocks[:4]]
    prefills = [(Row(70, shared, block, context=64), inputs) for block in blocks[4:]]
    outputs = run_rows(op, pool, decodes, prefills, log=log)
    assert_bitwise(pool.state[shared], kept)
    for group, results in ((blocks[:4], outputs[:4]), (blocks[4:], outputs[4:])):
        for block, output in zip(group, results, strict=True):
            assert not pool.state[block].isnan().any()
            assert_bitwise(pool.state[block], pool.state[group[0]])
            assert_bitwise(output, results[0])


@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_a_fold_changes_nothing_but_its_dst(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """A row gives and logs the same without a dst, with another dst, and with its src as dst."""
    op = make()
    scene = Scene(op, dtype, state_dtype)
    (in_place,) = held(scene.pool, 1)
    dst = scene.pool.take()
    for target in (0, dst, in_place):
        row = scene.decode(5, in_place, 4, 11, target)
        scene.decodes[-1] = row, scene.decodes[0][1]
        for tensor in scene.log.tensors:
            tensor[row.log_slot] = tensor[scene.decodes[0][0].log_slot]
    outputs = [run_rows(op, scene.pool, [each], log=scene.log)[0] for each in scene.decodes]
    for (row, _), output in zip(scene.decodes, outputs, strict=True):
        assert_bitwise(output, outputs[0])
        slots = row.log_slot, scene.decodes[0][0].log_slot
        for tensor, other in zip(*(scene.log.held(slot, 4, FOLD) for slot in slots), strict=True):
            assert_bitwise(tensor, other)
    assert_bitwise(scene.pool.state[in_place], scene.pool.state[dst])


@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
@pytest.mark.parametrize("gap", [*full(0, 4096 + 16), 16])
def test_any_slot_stride_gives_the_same(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype, gap: int
) -> None:
    op = make()
    results = []
    for each in (48, gap):
        pool = Pool(op.state_shape, state_dtype, gap=each)
        log = Log(op, pool, dtype, gap=each)
        src, dst, end = held(pool, 1)[0], pool.take(), pool.take()
        inputs, token = op.inputs(100, dtype), op.inputs(1, dtype)
        row = Row(1, src, dst, log_slot=log.take())
        outputs = run_rows(op, pool, [(row, token)], [(Row(100, src, end, context=64), inputs)], log=log)
        results.append([*outputs, pool.state[dst], pool.state[end], *log.held(row.log_slot, 0, 1)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(bits(first), bits(second))


@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_batches_without_tokens_do_nothing(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    op = make()
    pool = Pool(op.state_shape, state_dtype)
    log = Log(op, pool, dtype)
    slab, slabs = pool.slab.clone(), log.slabs()
    empty = op.inputs(0, dtype)
    run_rows(op, pool, [(Row(0), empty)] * 3, [(Row(0), empty)] * 2, tail=4, log=log)
    run_rows(op, pool, [], [(Row(0), empty)] * 2)
    pool.assert_only_written(slab, [])
    log.assert_only_written(slabs, [])
