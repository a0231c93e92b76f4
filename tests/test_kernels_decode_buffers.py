"""Check decode rows at addresses that never move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kernel_cases import Log, Op, Pool, Row, assert_bitwise, int32, plan_arrays, random, row_starts
from kernel_ops import OPS
from mambacache.kernels import DecodeBuffers, StateIndices

DECODE = ("decode_src", "decode_dst", "log_slot", "log_start", "log_end", "decode_len")
WIDTH, MAX_ROWS = 3, 9


def rows_of(count: int) -> list[Row]:
    """Return rows of 3, 1, 2, 3, ... tokens, each with its own slot and two blocks; every second row is folded."""
    return [
        Row((3, 1, 2)[i % 3], 2 * i + 1, (2 * i + 2) * (i % 2), log_slot=i + 1, log_start=i, log_end=i + i % 3)
        for i in range(count)
    ]


def test_rows_beyond_the_plan_are_null() -> None:
    buffers = StateIndices.decode_buffers(MAX_ROWS, WIDTH, "cpu")
    assert isinstance(buffers, DecodeBuffers)
    for count, padded in ((5, 8), (2, 4), (0, 8), (9, 9), (3, 3), (0, 0)):
        arrays = plan_arrays(rows_of(count), [])
        indices = buffers.fill(arrays, padded)
        counts = indices.num_decodes, indices.tokens_per_decode, indices.num_prefills, indices.num_tokens
        assert counts == (padded, WIDTH, 0, padded * WIDTH)
        for name in DECODE:
            values = getattr(indices, name).numpy()
            assert len(values) == padded and not values[count:].any()
            assert count == 0 or np.array_equal(values[:count], arrays[name])
        folds = indices.folds.numpy()
        assert folds[0] == count // 2 and not folds[1 + 5 * folds[0] :].any()
        assert indices.query_start_loc.tolist() == [padded * WIDTH] and indices.seq_chunk_start.tolist() == [0]


def test_addresses_never_move() -> None:
    buffers = StateIndices.decode_buffers(MAX_ROWS, WIDTH, "cpu")
    seen: dict[int, StateIndices] = {}
    addresses = set()
    for padded in (4, 8, 4, 9, 8):
        indices = buffers.fill(plan_arrays(rows_of(3), []), padded)
        assert seen.setdefault(padded, indices) is indices
        addresses.add(tuple(getattr(indices, name).data_ptr() for name in (*DECODE, "folds", "query_start_loc")))
    assert len(addresses) == 1
    assert buffers.fill({}, 4) is seen[4] and not seen[4].decode_len.any()


@pytest.mark.parametrize("make", OPS.values(), ids=OPS.keys())
def test_padded_rows_change_nothing(make: Callable[[], Op]) -> None:
    op, rows = make(), rows_of(4)
    arrays = plan_arrays(rows, [])
    states, before = random(9, *op.state_shape, seed=3, dtype=torch.float32), []
    for row in rows:
        logged, S = op.inputs(row.log_end - row.log_start, torch.float32, seed=row.log_slot), states[row.src].double()
        before.append((op.entries(logged, S), op.walk(logged, S)[1]))
    results = []
    for indices in (
        StateIndices.from_arrays(arrays, "cpu"),
        StateIndices.decode_buffers(MAX_ROWS, WIDTH, "cpu").fill(arrays, 6),
    ):
        pool = Pool(op.state_shape, torch.float32)
        pool.state[:9] = states
        log = Log(op, pool, torch.float32)
        for row, (entries, walked) in zip(rows, before, strict=True):
            log.fill(row.log_slot, entries, row.log_start, walked, drafts=1)
        inputs = op.inputs(indices.num_tokens, torch.float32)
        for name, x in inputs.items():
            inputs[name] = torch.full_like(x, torch.nan)
            for start, row in zip(row_starts(rows, []), rows, strict=True):
                inputs[name][start : start + row.length] = op.inputs(row.length, torch.float32, seed=start)[name]
        y = op.run(inputs, pool.state, log.tensors, indices)
        results.append((y, pool.slab, *(each.slab for each in log.pools)))
    (plain, *slabs), (padded, *padded_slabs) = results
    assert_bitwise(padded[: len(plain)], plain)
    for slab, padded_slab in zip(slabs, padded_slabs, strict=True):
        assert_bitwise(padded_slab, slab)
    assert not padded[len(plain) :].any()


@pytest.mark.parametrize(
    ("decodes", "prefills", "padded", "change", "message"),
    [
        (rows_of(5), (), 4, {}, "5 decode rows do not fit into 4 padded rows of buffers that hold 9"),
        (rows_of(2), (), 10, {}, "2 decode rows do not fit into 10 padded rows of buffers that hold 9"),
        ([Row(1, 1, 2, width=2)], (), 4, {}, "The decode rows have 2 tokens, but the buffers were made for 3"),
        (rows_of(1), [Row(5, 0, 2)], 4, {}, "The step has 1 prefill rows, which decode buffers do not hold"),
        (rows_of(1), (), 4, {"decode_len": int32([4])}, "decode_len goes from 4 to 4, but a row has 3 tokens"),
        (rows_of(2), (), 4, {"log_slot": int32([1])}, "log_slot has 1 entries where the other arrays"),
        (rows_of(1), (), 4, {"log_end": int32([14])}, "its tokens pass the log's 16 entries"),
        (rows_of(1), (), 4, {"decode_src": np.zeros(1)}, "decode_src is float64, but index arrays must be int32"),
    ],
)
def test_other_rows_are_refused(
    decodes: Sequence[Row], prefills: Sequence[Row], padded: int, change: dict[str, Any], message: str
) -> None:
    buffers = StateIndices.decode_buffers(MAX_ROWS, WIDTH, "cpu")
    with pytest.raises(ValueError, match=message):
        buffers.fill(plan_arrays(decodes, prefills) | change, padded)
