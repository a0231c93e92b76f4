"""What every recurrent op reads and writes, in a shuffled pool full of NaN, against a token-by-token float64 oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernel_cases import Inputs, Op, Pool, Row, assert_bitwise, bits, part, random, run_rows
from kernel_ops import EVERY_OP_AND_DTYPE

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}

Case = tuple[list[Row], list[Row], Pool]


def held(pool: Pool, count: int) -> list[int]:
    """Blocks with a finite state in each."""
    return [pool.take(random(*pool.shape[1:], seed=50 + i)) for i in range(count)]


def mixed_batch(op: Op, dtype: torch.dtype, width: int) -> Case:
    """Every kind of row that a plan may hold, `width` tokens per decode row."""
    pool = Pool(op.state_shape, dtype, blocks=128)
    shared, in_place, other, window = held(pool, 4)

    def fresh(count: int) -> tuple[int, ...]:
        return tuple(pool.take() for _ in range(count))

    decodes = [
        Row(width, shared, fresh(width)),
        Row(width, in_place, (in_place, *fresh(width - 1))),
        Row(1, shared, fresh(1)),
        Row(width, 0, fresh(width)),
        Row(1, other, (0,)),
        Row(0, 0, (0,)),
        Row(width, 0, (0,) * width),  # computed, and stored nowhere
        Row(width, other, (0,) * (width - 1) + fresh(1), boundary_index=width - 1 if width > 1 else -1),
        Row(
            width,
            other,
            fresh(width),
            conv_src=window,
            conv_offset=width - 1,
            boundary_index=width - 1 if width > 1 else -1,
        ),
    ]
    prefills = [
        Row(1, shared, fresh(1), context=64),
        Row(2, 0, fresh(1)),
        Row(3, other, fresh(1), context=62, checkpoints={64: pool.take()}),
        Row(0, 0, (0,)),
        Row(200, shared, fresh(1), context=37, checkpoints={64: pool.take(), 192: pool.take()}),
        Row(64, other, fresh(1), context=128, conv_src=window, conv_offset=2),
        Row(70, shared, (0,), context=1),
        Row(130, 0, fresh(1), checkpoints={64: pool.take(), 128: pool.take()}),
    ]
    return decodes, prefills, pool


def with_inputs(op: Op, rows: list[Row], dtype: torch.dtype, seed: int) -> list[tuple[Row, Inputs]]:
    return [(row, op.inputs(row.length, dtype, seed + i)) for i, row in enumerate(rows)]


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_mixed_batch_reads_and_writes_what_the_plan_says(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype, width: int
) -> None:
    op = make()
    decode_rows, prefill_rows, pool = mixed_batch(op, state_dtype, width)
    decodes, prefills = with_inputs(op, decode_rows, dtype, 0), with_inputs(op, prefill_rows, dtype, 20)
    slab = pool.slab.clone()
    before = pool.state.cpu().double()
    after = before.clone()
    expected = [op.walk(row, inputs, before, after, decode=True) for row, inputs in decodes]
    expected += [op.walk(row, inputs, before, after, decode=False) for row, inputs in prefills]

    outputs = run_rows(op, pool, decodes, prefills, tail=5)

    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    tolerance = 0 if op.exact_state else max(TOLERANCE[state_dtype], 1e-11)
    torch.testing.assert_close(pool.state.cpu().double(), after, atol=tolerance, rtol=tolerance, equal_nan=True)
    written = [block for row in decode_rows for block in row.dst if block]
    written += [block for row in prefill_rows for block in row.stored.values()]
    pool.assert_only_written(slab, written)
    assert pool.state[0].isnan().all()


@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_src_survives_while_its_dst_is_written_elsewhere(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Many rows resume from one block; it stays bitwise the same, and equal rows get equal states."""
    op = make()
    pool = Pool(op.state_shape, state_dtype)
    (shared,) = held(pool, 1)
    inputs, token = op.inputs(70, dtype), op.inputs(1, dtype)
    blocks = [pool.take() for _ in range(8)]
    kept = pool.state[shared].clone()
    decodes = [(Row(1, shared, (block,)), token) for block in blocks[:4]]
    prefills = [(Row(70, shared, (block,), context=64), inputs) for block in blocks[4:]]
    outputs = run_rows(op, pool, decodes, prefills)
    assert_bitwise(pool.state[shared], kept)
    for group, results in ((blocks[:4], outputs[:4]), (blocks[4:], outputs[4:])):
        for block, output in zip(group, results, strict=True):
            assert not pool.state[block].isnan().any()
            assert_bitwise(pool.state[block], pool.state[group[0]])
            assert_bitwise(output, results[0])


@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_a_token_without_dst_changes_nothing_but_its_own_store(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Real tokens whose dst is null give what they give with one; padding stores nothing, whatever its dst says."""
    op = make()
    pool = Pool(op.state_shape, state_dtype)
    (src,) = held(pool, 1)
    inputs = op.inputs(3, dtype)
    first, *_, full_end = full = tuple(pool.take() for _ in range(3))
    (stored,) = run_rows(op, pool, [(Row(3, src, full, boundary_index=2), inputs)])
    before, end, padding = pool.slab.clone(), pool.take(), (pool.take(), pool.take())
    rows = Row(3, src, (0, 0, end), boundary_index=2), Row(3, src, (0, 0, 0)), Row(1, 0, (0, *padding))
    outputs = run_rows(op, pool, [(rows[0], inputs), (rows[1], inputs), (rows[2], part(inputs, 0, 1))])
    for output in outputs[:2]:
        assert_bitwise(output, stored)
    assert outputs[2].any()
    assert_bitwise(op.final_state(pool.state, end, end, 0), op.final_state(pool.state, full_end, first, 2))
    pool.assert_only_written(before, [end])


@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_updating_in_place_equals_writing_elsewhere(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    op = make()
    pool = Pool(op.state_shape, state_dtype)
    src, dst = held(pool, 1)[0], pool.take()
    token = op.inputs(1, dtype)
    (elsewhere,) = run_rows(op, pool, [(Row(1, src, (dst,)), token)])
    (in_place,) = run_rows(op, pool, [(Row(1, src, (src,)), token)])
    assert_bitwise(in_place, elsewhere)
    assert_bitwise(pool.state[src], pool.state[dst])


@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
@pytest.mark.parametrize("gap", [0, 16, 4096 + 16])
def test_any_slot_stride_gives_the_same(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype, gap: int
) -> None:
    op = make()
    results = []
    for pool in (Pool(op.state_shape, state_dtype, gap=48), Pool(op.state_shape, state_dtype, gap=gap)):
        src, dst, end = held(pool, 1)[0], pool.take(), pool.take()
        inputs, token = op.inputs(100, dtype), op.inputs(1, dtype)
        outputs = run_rows(op, pool, [(Row(1, src, (dst,)), token)], [(Row(100, src, (end,), context=64), inputs)])
        results.append([*outputs, pool.state[dst], pool.state[end]])
    for first, second in zip(*results, strict=True):
        assert torch.equal(bits(first), bits(second))


@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_batches_without_tokens_do_nothing(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    op = make()
    pool = Pool(op.state_shape, state_dtype)
    slab = pool.slab.clone()
    empty = op.inputs(0, dtype)
    run_rows(op, pool, [(Row(0), empty)] * 3, [(Row(0), empty)] * 2, tail=4)
    run_rows(op, pool, [], [(Row(0), empty)] * 2)
    pool.assert_only_written(slab, [])
