"""Check index arrays on the device, and the arguments that the ops refuse."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_cases import Log, Op, Pool, Recurrence, Row, int32, plan_arrays
from kernel_ops import EVERY_REFUSAL, OPS, Conv1dOp, DeltaRuleOp
from mambacache import kernels
from mambacache.kernels import StateIndices, conv1d, pack_arrays
from mambacache.kernels.gpu.common.chunks import keep_busy


def test_arrays_share_a_buffer_and_start_at_multiples_of_16_bytes() -> None:
    arrays = {"a": int32([1, 2, 3]), "b": int32([[4, 5], [6, 7]]).T, "none": int32([]), "c": int32([8])}
    packed = pack_arrays(arrays, "cpu")
    assert list(packed) == list(arrays)
    for name, array in arrays.items():
        assert packed[name].dtype == torch.int32 and np.array_equal(packed[name].numpy(), array)
        assert packed[name].storage_offset() % 4 == 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in packed.values()}) == 1
    arrays["a"][:] = 0
    assert packed["a"].tolist() == [1, 2, 3]


def test_names_and_host_integers_of_a_plan() -> None:
    decodes = [Row(1, 3, 4, log_slot=1), Row(4, 5, 6, log_slot=2, log_start=3, log_end=12), Row(0, 7, 8), Row(2, 7)]
    prefills = [Row(100, 1, 2, context=30, checkpoints={64: 10}), Row(0), Row(1, 0, 11)]
    arrays = plan_arrays(decodes, prefills, num_tokens=128)
    indices = StateIndices.from_arrays(arrays, "cpu")
    counts = indices.num_decodes, indices.tokens_per_decode, indices.num_prefills, indices.num_tokens
    assert counts == (4, 4, 3, 128)
    for name, array in arrays.items():
        assert np.array_equal(getattr(indices, name).numpy(), array)
    assert indices.chunk_start.tolist() == [16, 50, 114, 116] and indices.chunk_dst.tolist() == [10, 0, 2, 11]
    assert indices.seq_chunk_start.tolist() == [0, 3, 3, 4]
    assert indices.prefill_rows.tolist() == [[16, 116, 30, 0, 3, 1], [116, 117, 0, 3, 4, 0], [116, 116, 0, 3, 3, 0]]
    assert indices.row_chunks == [3, 1, 0]
    assert indices.folds.tolist() == [2, *(3, 4, 1, 0, 1), *(5, 6, 2, 3, 16), *[0] * 10]
    assert indices.arrivals.tolist() == [[0] * 32] * 4
    assert StateIndices.from_arrays(plan_arrays(decodes, prefills), "cpu").num_tokens == 117
    assert not hasattr(indices, "kv_slot")


def test_indices_without_row_lengths_do_not_keep_programs_busy() -> None:
    told = StateIndices.from_arrays(plan_arrays([], [Row(64), Row(64)]), "cpu")
    tensors = {name: x for name, x in vars(told).items() if isinstance(x, Tensor) and name != "flat"}
    untold = StateIndices(tensors, 0, 1, 2, told.num_tokens)
    assert (told.row_chunks, untold.row_chunks) == ([1, 1], None)
    assert keep_busy(told, 4, 8) and not keep_busy(untold, 4, 8)


@pytest.mark.parametrize(
    ("rows", "programs", "busy"),
    [
        ([Row(64)] * 4, 1, True),
        ([Row(64)] * 4, 8, True),  # two of 16 tiles each
        ([Row(64)] * 4, 9, True),  # 16 of 18 turns
        ([Row(64)] * 4, 10, False),
        ([Row(64)] * 4, 32, False),
        ([Row(640), *[Row(64)] * 3], 4, True),  # each has a tile of every row
        ([Row(640), *[Row(64)] * 3], 8, False),
        ([Row(64), Row(64, context=1)], 4, True),
        ([Row(64), Row(64, context=1)], 8, False),  # the second row is as long, and has two chunks
    ],
)
def test_programs_are_kept_busy_if_the_first_has_little_more_than_the_others(
    rows: list[Row], programs: int, busy: bool
) -> None:
    indices = StateIndices.from_arrays(plan_arrays([], rows), "cpu")
    assert keep_busy(indices, 4, programs) is busy is keep_busy(indices, 4, programs)


def test_arrays_that_a_step_does_not_need_may_be_left_out() -> None:
    arrays = plan_arrays([Row(1, 3, 4, log_slot=1)], [Row(5, 0, 2)])
    decode = {name: array for name, array in arrays.items() if name.startswith(("decode", "log"))}
    prefill = {name: array for name, array in arrays.items() if name not in decode}
    prefill["query_start_loc"] = int32([0, 5])
    prefill["chunk_start"] = int32([0])
    op = DeltaRuleOp()
    pool = Pool(op.state_shape, torch.float32)
    pool.state[3] = 1
    for part, tokens in ((decode, 1), (prefill, 5)):
        indices = StateIndices.from_arrays(part, "cpu")
        assert indices.num_tokens == tokens
        log = Log(op, pool, torch.float32).tensors if part is decode else ()
        assert op.run(op.inputs(tokens, torch.float32), pool.state, log, indices).isfinite().all()
    assert pool.state[[2, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("src", np.zeros(2, np.int64), "src is int64, but index arrays must be int32"),
        ("context_len", int32([0]), "context_len has 1 entries where the other arrays need 2"),
        ("decode_src", int32([0, 0]), "query_start_loc begins at 1, which is no multiple of 2 decode rows"),
        ("decode_dst", int32([0, 0]), "decode_dst has 2 entries where the other arrays need 1"),
        ("decode_len", int32([]), "decode_len has 0 entries where the other arrays need 1"),
        ("decode_len", int32([2]), "decode_len goes from 2 to 2, but a row has 1 tokens"),
        ("decode_len", int32([-1]), "decode_len goes from -1 to -1, but a row has 1 tokens"),
        ("log_slot", int32([]), "log_slot has 0 entries where the other arrays need 1"),
        ("log_start", int32([-1]), "A row's log ends before it begins, or its tokens pass the log's 16 entries"),
        ("log_start", int32([4]), "A row's log ends before it begins, or its tokens pass the log's 16 entries"),
        ("log_end", int32([16]), "A row's log ends before it begins, or its tokens pass the log's 16 entries"),
        ("block_table", int32([1, 2]), "block_table has 2 entries where the other arrays need 3"),
        ("block_table_start", int32([0, 1]), "block_table_start has 2 entries where the other arrays need 4"),
        ("chunk_dst", int32([0]), "chunk_dst has 1 entries where the other arrays need 2"),
        ("query_start_loc", int32([0, 5, 8]), "Decode rows have 0 tokens, but 1 to 8 are supported"),
        ("tokens", int32([0]), "The token arrays have 1 entries, but the rows hold 9 tokens"),
    ],
)
def test_contradicting_arrays_are_refused(name: str, array: np.ndarray, message: str) -> None:
    rows = [Row(1, 3, 4, log_end=3, pages=(1,))], [Row(5, 0, 2, pages=(2,)), Row(3, 0, 1, pages=(3,))]
    arrays = plan_arrays(*rows, block_size=64)
    StateIndices.from_arrays(arrays, "cpu")
    with pytest.raises(ValueError, match=message):
        StateIndices.from_arrays(arrays | {name: array}, "cpu")


def test_prefill_rows_begin_where_decode_rows_end() -> None:
    arrays = plan_arrays([], [Row(5, 0, 2)]) | {"query_start_loc": int32([1, 6])}
    with pytest.raises(ValueError, match="query_start_loc must begin where the decode tokens end"):
        StateIndices.from_arrays(arrays, "cpu")


def test_a_decode_array_may_not_be_left_out() -> None:
    arrays = plan_arrays([Row(1, 3, 4)], [])
    del arrays["decode_len"]
    with pytest.raises(ValueError, match="decode_len has 0 entries where the other arrays need 1"):
        StateIndices.from_arrays(arrays, "cpu")


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.long(),
        lambda x: torch.cat([x.new_zeros(1), x])[1:],
        lambda x: torch.stack([x, x], dim=1)[:, 0],
        lambda x: x.to("meta"),
    ],
    ids=["dtype", "address", "strides", "device"],
)
def test_tensors_that_no_kernel_could_read_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    tensors = pack_arrays(plan_arrays([Row(2, 3, 4), Row(1, 3, 6)], []), "cpu")
    assert StateIndices(tensors, 2, 2, 0, 4).decode_len.tolist() == [2, 1]
    with pytest.raises(ValueError, match=r"decode_len is int(32|64) on .*, but index tensors must be int32"):
        StateIndices(tensors | {"decode_len": change(tensors["decode_len"])}, 2, 2, 0, 4)


@pytest.mark.parametrize("tokens", [0, 9])
def test_decode_rows_have_1_to_8_tokens(tokens: int) -> None:
    message = f"Decode rows have {tokens} tokens, but 1 to 8 are supported: run longer ones as prefill rows"
    arrays = plan_arrays([Row(8)], [])
    StateIndices.from_arrays(arrays, "cpu")
    with pytest.raises(ValueError, match=message):
        StateIndices.decode_buffers(4, tokens, "cpu")
    arrays |= {"decode_len": int32([tokens])}
    with pytest.raises(ValueError, match=message):
        StateIndices.from_arrays(arrays | {"query_start_loc": int32([tokens])}, "cpu")
    with pytest.raises(ValueError, match=message):
        StateIndices(pack_arrays(arrays, "cpu"), 1, tokens, 0, tokens)


@pytest.mark.parametrize("make", OPS.values(), ids=OPS.keys())
def test_pools_that_no_kernel_could_take_are_refused(make: Callable[[], Op]) -> None:
    op = make()
    indices = StateIndices.from_arrays(plan_arrays([], [Row(5, 0, 2)]), "cpu")
    inputs = op.inputs(5, torch.float32)
    slab = torch.zeros(100_000)
    size = -(-int(np.prod(op.state_shape)) // 4) * 4
    inner = torch.empty(op.state_shape, device="meta").stride()
    good = slab.as_strided((4, *op.state_shape), (size, *inner))
    op.run(inputs, good, (), indices)
    for stride, offset, message in [
        (size + 1, 0, "multiples of 16 bytes"),
        (size + 4, 1, "multiples of 16 bytes"),
        (size - 16, 0, "must not overlap"),
    ]:
        with pytest.raises(ValueError, match=message):
            op.run(inputs, slab.as_strided((4, *op.state_shape), (stride, *inner), offset), (), indices)
    with pytest.raises(ValueError, match="Every row of state must be contiguous"):
        op.run(inputs, torch.zeros(4, *op.state_shape[:-1], 2 * op.state_shape[-1])[..., ::2], (), indices)
    with pytest.raises(ValueError, match="has 5 tokens, but the indices were made for 6"):
        longer = StateIndices.from_arrays(plan_arrays([], [Row(6, 0, 2)]), "cpu")
        op.run(inputs, good, (), longer)
    with pytest.raises(ValueError, match=r"on meta, but the indices are on cpu"):
        op.run({name: value.to("meta") for name, value in inputs.items()}, good, (), indices)


def test_conv1d_errors() -> None:
    op = Conv1dOp(dim=8)
    indices = StateIndices.from_arrays(plan_arrays([Row(3, 1, 2, log_slot=1)], []), "cpu")
    good: dict[str, Any] = {
        "x": torch.zeros(3, 8),
        "weight": torch.zeros(8, 4),
        "bias": None,
        "state": torch.zeros(4, 3, 8),
        "log": torch.zeros(2, 16, 8),
    }
    conv1d(**good, indices=indices, activation=None)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"state": torch.zeros(4, 4, 8)}, r"state has shape \[4, 4, 8\] where the other arguments need \[4, 3, 8\]"),
        ({"log": None}, "The log has 0 tensors, but decode rows need 1: see mambacache.kernels.logs"),
        ({"weight": torch.zeros(8, 5)}, "The width of the convolution is 5, but it must be one of 2, 3, 4"),
        ({"weight": torch.zeros(4, 4)}, r"weight has shape \[4, 4\] where the other arguments need \[8, 4\]"),
        ({"bias": torch.zeros(4)}, "bias has shape"),
        ({"input_gate": torch.zeros(3, 4)}, r"input_gate has shape \[3, 4\] where the other arguments need \[3, 8\]"),
        ({"output_gate": torch.zeros(3, 8).half()}, "output_gate is float16 where float32 is needed"),
        ({"state": torch.zeros(4, 3, 16)}, "state has shape"),
        ({"state": torch.zeros(4, 3, 8, dtype=torch.bfloat16)}, "state is bfloat16 where float32 is needed"),
        ({"x": torch.zeros(3, 8, 1)}, r"x has shape \[3, 8, 1\], but it must be \[F, dim\]"),
        ({"activation": "relu"}, "activation is 'relu', but it must be one of 'silu', None"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            conv1d(**({"activation": None} | good | change), indices=indices)
    assert op.reach == 3


@pytest.mark.parametrize(("make", "changes", "message"), EVERY_REFUSAL)
def test_arguments_that_do_not_fit_together_are_refused(
    make: Callable[[], Recurrence], changes: dict[str, Callable[[Tensor], Tensor]], message: str
) -> None:
    op = make()
    indices = StateIndices.from_arrays(plan_arrays([], [Row(3, 0, 1)]), "cpu")
    arguments = {**op.inputs(3, torch.float32), **op.parameters, "state": torch.zeros(4, *op.state_shape), "log": ()}
    function = getattr(kernels, op.name)
    function(**arguments, indices=indices)
    changed = {name: change(arguments[name]) for name, change in changes.items()}
    with pytest.raises(ValueError, match=message):
        function(**(arguments | changed), indices=indices)


@pytest.mark.parametrize("make", OPS.values(), ids=OPS.keys())
def test_logs_that_no_kernel_could_take_are_refused(make: Callable[[], Op]) -> None:
    """Check steps with decode rows: other steps do not look at logs."""
    op = make()
    pool = Pool(op.state_shape, torch.float32)
    log = Log(op, pool, torch.float32).tensors
    inputs = op.inputs(2, torch.float32)
    changes: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda x: x[:, :8], "tensor 0 of the log has shape"),
        (Tensor.bfloat16, "tensor 0 of the log is bfloat16 where float32 is needed"),
        (lambda x: x.repeat_interleave(2, dim=-1)[..., ::2], "Every row of tensor 0 of the log must be contiguous"),
        (lambda x: x[:1].expand_as(x), "Rows of tensor 0 of the log must not overlap"),
        (lambda x: x.to("meta"), "tensor 0 of the log is on meta, but the indices are on cpu"),
    ]
    for row, others in (([Row(2, log_slot=1)], []), ([], [Row(2)])):
        indices = StateIndices.from_arrays(plan_arrays(row, others), "cpu")
        op.run(inputs, pool.state, log, indices)
        for change, message in changes:
            with pytest.raises(ValueError, match=message) if row else nullcontext():
                op.run(inputs, pool.state, [change(log[0]), *log[1:]], indices)
        with pytest.raises(ValueError, match=r"but decode rows need \d") if row else nullcontext():
            op.run(inputs, pool.state, log[:-1], indices)
