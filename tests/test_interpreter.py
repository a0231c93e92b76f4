"""Run the GPU kernels in Triton's interpreter, on small shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import op_kda
import test_kernels_accuracy as accuracy
import test_kernels_bitwise as bitwise
import test_kernels_contract as contract
import test_kernels_gated_rms_norm as norm
import test_kernels_out as out
import test_kernels_paged_attention as attention
import test_kernels_rms_norm as plain_norm
from gpu_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    NORM_OPTIONS,
    Batch,
    Dtypes,
    Make,
    Mix,
    errors_and_ruler,
    norm_errors,
    served_as,
)
from kernel_cases import Pool, Recurrence, Row, assert_bitwise, run_rows
from mambacache.kernels import api, gpu, reference
from op_conv1d import Conv1dOp
from op_gated_delta_rule import DeltaRuleOp, TokenRows
from op_kda import KDAOp
from op_selective_scan import SelectiveScanOp
from op_ssd import SsdOp
from selection import FULL, full, some
from test_gpu_accuracy import SLACK

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="the GPU itself runs them"),
    pytest.mark.usefixtures("interpreted"),
]

OPS: dict[str, Make] = {
    "conv1d": Conv1dOp,
    "short_conv": partial(Conv1dOp, 40, 3, False, None, True),
    "gated_delta_rule": partial(DeltaRuleOp, 1, 2, 16, 32),
    "gated_delta_rule_negative": partial(DeltaRuleOp, 1, 1, 48, 16, 2.0),
    "kda": partial(KDAOp, 2, 32, 16),
    "kda_uneven": op_kda.uneven,
    "ssd": partial(SsdOp, 1, 2, 16, 32),
    "ssd_plain": partial(SsdOp, 2, 2, 80, 48, True, (0.3, 1.5)),
    "selective_scan": SelectiveScanOp,
    "selective_scan_plain": partial(SelectiveScanOp, 24, 3, True),
}
MIX = Mix((3, 1, 2), (70, 1, 130))
TOKEN_BY_TOKEN = Mix((3, 1, 2), (70, 1))
BOUND = 2e-6  # in fp32
CONTRACT: dict[str, Callable[..., None]] = {
    "drafts": partial(contract.test_mixed_batch_reads_and_writes_as_planned, width=3),
    "windows": partial(contract.test_every_window_of_a_log, step=5),
    "folds": contract.test_a_fold_changes_nothing_but_its_dst,
    "steps and drafts": partial(bitwise.test_steps_and_drafts_change_no_bit, length=24),
    "shared src": contract.test_src_survives_while_its_dst_is_written_elsewhere,
    "split": partial(bitwise.test_prefill_split_at_any_boundary_equals_the_unsplit_run, context=128),
    "no tokens": contract.test_batches_without_tokens_do_nothing,
}
QUICK = ("folds", "no tokens")
CONTRACT_ROWS = [
    pytest.param(test, OPS[op], id=f"{op}-{name}", marks=() if op == "conv1d" or name in QUICK else FULL)
    for op in ("conv1d", "short_conv", "gated_delta_rule", "kda", "selective_scan_plain", "ssd")
    for name, test in CONTRACT.items()
    # The scan takes 1,500 tokens one by one, and short_conv runs the kernel of conv1d.
    if name != "split" or op not in ("selective_scan_plain", "short_conv")
]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the ops on CPU tensors to the GPU's kernels, except in float64."""
    monkeypatch.setattr(api, "backend", lambda x: reference if x.dtype == torch.float64 else gpu)


@pytest.mark.parametrize("make", some(4, OPS.values()), ids=OPS.keys())
@pytest.mark.parametrize("dtypes", [(FP32, FP32), *full(*(((FP16, state),) for state in (FP32, FP16, BF16)))], ids=str)
def test_accuracy(make: Make, dtypes: Dtypes) -> None:
    """Check errors, in 16 bits beside the reference's with rounded operands. The interpreter truncates bf16."""
    op = make()
    if isinstance(op, Conv1dOp):  # its states have the dtype of activations
        dtypes = dtypes[0], dtypes[0]
    mix = TOKEN_BY_TOKEN if isinstance(op, SelectiveScanOp) else MIX
    factor = 3 if BF16 in dtypes else 2
    for what, (error, ruler) in errors_and_ruler(Batch(op, mix, dtypes)).items():
        assert error < (BOUND if dtypes[0] == FP32 else factor * ruler + SLACK), what


@pytest.mark.parametrize("gpu", [*full("sm80"), "sm86"])
@pytest.mark.parametrize("op", ["gated_delta_rule_negative", "kda_uneven", "ssd_plain"])
@pytest.mark.parametrize("dtype", [FP16, *full(FP32)], ids=str)
def test_tiles_of_another_gpu(gpu: str, op: str, dtype: torch.dtype) -> None:
    with served_as(gpu):
        test_accuracy(OPS[op], (dtype, FP32))


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_large_states_are_finite_operands_in_fp16(op: str) -> None:
    batch = Batch(OPS[op](), Mix((), (70,)), (FP16, FP32))
    batch.pool.state.mul_(1e6)
    batch.run()
    assert batch.pool.state[batch.prefill_blocks].isfinite().all()


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *(("gated_delta_rule", name) for name in "kvab"),
        *(("kda", name) for name in "kvb"),
        *(("ssd", name) for name in "xB"),
    ],
)
def test_a_nan_input_of_a_prompt_reaches_its_state(op: str, name: str) -> None:
    recurrence = OPS[op]()
    inputs = recurrence.inputs(100, FP16)
    inputs[name][30] = torch.nan
    pool = Pool(recurrence.state_shape, FP32)
    end = pool.take(torch.zeros(recurrence.state_shape))
    run_rows(recurrence, pool, [], [(Row(100, 0, end), inputs)])
    assert pool.state[end].isnan().any()


@pytest.mark.parametrize("make", [partial(KDAOp, 2, 32, 16), partial(DeltaRuleOp, 1, 2, 32, 16)], ids=["kda", "gdn"])
def test_states_of_any_magnitude_leave_every_token_exact(make: Callable[[], DeltaRuleOp]) -> None:
    """An early token's values may be 1e20 times a late token's: no small factor between them may be lost.

    The floor is the loss where fp32 rounds sums of log decays near 100.
    """
    op = make()
    for name in ("A_log", "dt_bias"):
        op.parameters[name].zero_()
    rows = TokenRows(op, 2, op.inputs(2 * 100, FP32), (1e20, 1e-30), "cpu")
    assert (rows.errors() <= 3 * rows.errors(reference).clamp(min=2**-16)).all()


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Form products as Hopper does: truncate TF32 operands, and the sum after each 8 or 16 terms."""

    def create_dot(
        builder: object, x: TensorHandle, y: TensorHandle, total: TensorHandle, *rest: object
    ) -> TensorHandle:
        fp32 = x.data.dtype == np.float32
        left, right = (truncate_tf32(each.data) if fp32 else each.data for each in (x, y))
        result, size = total.data, 8 if fp32 else 16
        for first in range(0, left.shape[-1], size):
            terms = slice(first, first + size)
            exact = result + left[..., terms].astype(np.float64) @ right[..., terms, :].astype(np.float64)
            result = exact.astype(np.float32)
            result = np.where(abs(result) > abs(exact), np.nextafter(result, np.float32(0)), result)
        return TensorHandle(result, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def truncate_tf32(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x).view(np.int32) & -0x2000).view(np.float32)


@pytest.mark.parametrize("make", [partial(KDAOp, 1, 128, 128), partial(SsdOp, 1, 2, 64, 128)], ids=["kda", "ssd"])
def test_no_token_is_much_worse_than_in_the_recurrence(
    make: Callable[[], Recurrence], tensor_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, worst_of_chunked = accuracy.errors(make(), FP32)
    monkeypatch.setattr(api, "backend", lambda x: reference)
    *_, worst_of_recurrent = accuracy.errors(make(), FP32, accuracy.run_decode)
    assert worst_of_chunked < accuracy.WORST_TOKEN * worst_of_recurrent


@pytest.mark.parametrize(("test", "make"), CONTRACT_ROWS)
def test_contract(test: Callable[..., None], make: Make) -> None:
    test(make=make, dtype=FP32, state_dtype=FP32)


@pytest.mark.parametrize("options", NORM_OPTIONS.values(), ids=NORM_OPTIONS.keys())
@pytest.mark.parametrize(
    ("heads", "dim", "group_size"), [*full((3, 48, None), (1, 600, None)), (1, 96, 24), (1, 70000, 35000)]
)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP16, FP16), (FP16, FP32)], ids=str)
def test_gated_rms_norm(options: dict, heads: int, dim: int, group_size: int | None, dtypes: Dtypes) -> None:
    error, ruler = norm_errors(21 if dim < 1000 else 2, heads, dim, *dtypes, group_size=group_size, **options)
    assert error <= 1.1 * ruler + 1e-7


def test_gated_rms_norm_of_a_vector() -> None:
    norm.test_a_vector_counts_as_a_token()


@pytest.mark.parametrize("view", plain_norm.VIEWS)
@pytest.mark.parametrize("width", [*full(8, 600), 48, 35000])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [*full((FP32, FP32), (FP16, FP16), (FP32, FP16)), (FP16, FP32), (FP16, None)]
)
@pytest.mark.parametrize("round_normed", [True, False])
def test_rms_norm(
    round_normed: bool, dtype: torch.dtype, weight_dtype: torch.dtype | None, width: int, view: str
) -> None:
    x = plain_norm.norm_input(view, 21 if width < 1000 else 2, width, dtype)
    plain_norm.check_against_the_reference(x, plain_norm.norm_weight(width, weight_dtype), round_normed)


@pytest.mark.parametrize("view", ["dense", "heads"])
def test_rms_norm_of_a_token_does_not_depend_on_its_batch(view: str) -> None:
    plain_norm.test_a_token_does_not_depend_on_its_batch(view, 48, FP16, tokens=30)


@pytest.mark.parametrize("make", OPS.values(), ids=OPS.keys())
def test_out(make: Make) -> None:
    batch = Batch(make(), Mix((2, 1), (5,)), (FP32, FP32))

    def call(**options: Tensor) -> Tensor:
        state = batch.pool.view(batch.pool.slab.clone())
        return batch.op.run(batch.inputs, state, batch.log.views(batch.log.slabs()), batch.indices, **options)

    out.check_out(call, 8)


@pytest.mark.parametrize(("shape", "group_size"), [((21, 3, 48), None), ((5, 96), 24)])
def test_gated_rms_norm_into_out(shape: tuple[int, ...], group_size: int | None) -> None:
    out.test_gated_rms_norm_writes_its_result_into_out(shape, group_size, FP16, gap=8)


@pytest.mark.parametrize("shape", [(21, 48), (5, 2, 3, 48)])
def test_rms_norm_into_out(shape: tuple[int, ...]) -> None:
    out.test_rms_norm_writes_its_result_into_out(shape, True, gap=8)


@pytest.mark.parametrize(
    ("heads", "widths", "block_size", "dtypes"),
    [
        ((4, 2), (16, 16), 16, (FP32, FP32)),
        *full(((6, 1), (32, 80), 128, (FP16, FP32))),
        *full(((4, 4), (24, 16), 64, (FP16, FP16)), ((3, 1), (8, 8), 4, (FP32, FP16))),
    ],
    ids=str,
)
def test_paged_attention(heads: tuple[int, int], widths: tuple[int, int], block_size: int, dtypes: Dtypes) -> None:
    attention.test_mixed_batch(heads, widths, dtypes[0], 1.0, block_size, dtypes[1])


def test_paged_attention_of_a_row_does_not_depend_on_its_batch() -> None:
    attention.test_a_row_does_not_depend_on_its_batch()


def test_paged_attention_with_heads_before_tokens() -> None:
    attention.test_heads_before_tokens()


def test_paged_attention_of_many_parts_does_not_depend_on_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use short parts and few splits, so that a split takes several parts. Then let one program take all splits of a
    row."""
    attention_decode = import_module("mambacache.kernels.gpu.paged_attention.decode")
    monkeypatch.setattr(attention_decode, "PART", 64)
    monkeypatch.setattr(attention_decode, "SPLITS", 2)
    pages = attention.Pages(1, (16, 24), FP32)
    rows = [pages.row(context, 2, decode=True, seed=context) for context in (300, 510, 20)]
    tokens = attention.inputs(10, (2, 1), (16, 24), FP32)
    attention.run_and_check(pages, rows, [], tokens, None, attention.BOUND[FP32])
    outputs = []
    for waves in (attention_decode.WAVES, 1):
        monkeypatch.setattr(attention_decode, "WAVES", waves)
        monkeypatch.setattr(attention_decode, "processors", lambda index, waves=waves: waves)
        outputs.append(api.paged_attention(*tokens, pages.keys, pages.values, pages.indices(rows, [], 10)))
    assert_bitwise(*outputs)


def test_paged_attention_into_out() -> None:
    out.test_paged_attention_writes_its_result_into_out(gap=3)
