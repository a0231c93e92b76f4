"""Run the contract tests of the ops on a GPU: which blocks they write, and which results agree in every bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import test_kernels_bitwise as bitwise
import test_kernels_contract as contract
import test_kernels_out as out
from gpu_cases import DTYPES, FP16, FP32, MODELS, Dtypes, Make
from kernel_cases import Pool
from kernel_ops import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pools_on_the_gpu")]

COMPANIES = (1, 2, 3) * 5 + (6, 6, 7, 13, 31)  # rows of each kind beside the watched row, in 20 batches

SHARED: dict[str, Callable[..., None]] = {
    "mixed batch": partial(contract.test_mixed_batch_reads_and_writes_as_planned, width=1),
    "mixed batch with drafts": partial(contract.test_mixed_batch_reads_and_writes_as_planned, width=4),
    "shared src": contract.test_src_survives_while_its_dst_is_written_elsewhere,
    "every window": contract.test_every_window_of_a_log,
    "folds": contract.test_a_fold_changes_nothing_but_its_dst,
    "out": partial(out.test_an_op_writes_its_result_into_out, gap=8),
    "unaligned out": partial(out.test_an_op_writes_its_result_into_out, gap=3),
    "dense slots": partial(contract.test_any_slot_stride_gives_the_same, gap=0),
    "slots at 16 bytes": partial(contract.test_any_slot_stride_gives_the_same, gap=16),
    "no tokens": contract.test_batches_without_tokens_do_nothing,
    "split": partial(bitwise.test_prefill_split_at_any_boundary_equals_the_unsplit_run, context=0),
    "split after a hit": partial(bitwise.test_prefill_split_at_any_boundary_equals_the_unsplit_run, context=128),
    "checkpoints": bitwise.test_storing_checkpoints_changes_nothing,
    "company": lambda make, dtype, state_dtype: bitwise.check_in_company(make(), dtype, state_dtype, COMPANIES),
    "drafts": bitwise.test_steps_and_drafts_change_no_bit,
}
OF_PLACES = ("out", "unaligned out", "dense slots", "slots at 16 bytes", "no tokens")
"""These tests check where tensors lie. A kernel compiles for each such place, which takes some half a minute."""


def in_the_suite(name: str, dtypes: Dtypes, what: str) -> bool:
    """Return whether `make pytest-gpu` runs a test. Only `make pytest-gpu-full` runs tests with slow kernels."""
    if what in OF_PLACES:
        return name in DTYPES and dtypes in (DTYPES[name][0], DTYPES[name][-1])
    return dtypes != (FP16, FP32)


SMALL = [
    pytest.param(
        test,
        make,
        *dtypes,
        id=f"{kernels}-{what}",
        marks=[
            pytest.mark.xdist_group(kernels),  # these compile the same kernels
            *([] if in_the_suite(name, dtypes, what) else [pytest.mark.gpu_full]),
        ],
    )
    for name, make in OPS.items()
    for dtypes in DTYPES.get(make().name, ())[: None if name in DTYPES else 1]  # one variant of an op is enough
    for kernels in ["-".join([name, *(str(dtype).removeprefix("torch.") for dtype in dtypes)])]
    for what, test in SHARED.items()
]
REAL_ROWS = [
    pytest.param(models[name](1), *DTYPES[op][0], id=f"{op}-{name}") for op, models in MODELS.items() for name in models
]


@pytest.fixture
def pools_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (contract, bitwise):
        monkeypatch.setattr(module, "Pool", partial(Pool, device="cuda"))


@pytest.mark.parametrize(("test", "make", "dtype", "state_dtype"), SMALL)
def test_small_shapes(
    test: Callable[..., None],
    make: Make,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Products round operands to the activations' dtype, which shows in states of a finer dtype.
    tolerance = max(contract.TOLERANCE[dtype], contract.TOLERANCE[state_dtype])
    monkeypatch.setitem(contract.TOLERANCE, state_dtype, tolerance)
    test(make=make, dtype=dtype, state_dtype=state_dtype)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("test", [SHARED["split after a hit"], SHARED["company"]], ids=["split", "company"])
@pytest.mark.parametrize(("make", "dtype", "state_dtype"), REAL_ROWS)
def test_real_shapes(test: Callable[..., None], make: Make, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    test(make=make, dtype=dtype, state_dtype=state_dtype)
