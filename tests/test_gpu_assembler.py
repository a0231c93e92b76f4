"""Check the machine code of the kernels' variants, and run them over memory that earlier programs may have left.

ptxas 12.8 assembled a variant wrongly (see `sass`): KDA's first launch in fp32, in tiles of 16 or 32 channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_cases import DTYPES, FP32, MODELS, SHARED_BY, Batch, Case, Dtypes, Make, Mix, launchers, run_once
from mambacache.kernels.gpu.common.launch import Launcher
from op_gated_delta_rule import DeltaRuleOp
from op_kda import KDAOp
from op_ssd import SsdOp
from sass import disassembled, unwritten_reads
from test_gpu_bitwise import outcome
from test_gpu_paged_attention import SHAPES as ATTENTION_SHAPES
from test_gpu_paged_attention import Shape, batch_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]

WIDTHS = (16, 32, 48, 64, 128)  # of keys, or of SSD's states
SHAPES: dict[str, Make] = {
    f"{op}-{width}-{values}": make
    for width in WIDTHS
    for values in (16, 128)
    for op, make in {
        "gated_delta_rule": partial(DeltaRuleOp, 1, 2, width, values),
        "kda": partial(KDAOp, 2, width, values),
        "ssd": partial(SsdOp, 1, 2, values, width),
    }.items()
}
QUICK = "-16-128", "-48-128"
CASES = [
    *(Case(op, model, SHARED_BY[model], "varlen", DTYPES[op][0]) for op, models in MODELS.items() for model in models),
    *(Case(op, next(iter(MODELS[op])), 8, "varlen", dtypes) for op in MODELS for dtypes in DTYPES[op][1:]),
]
REPEATS = 20
MIXES = Mix((2, 1), (70, 1, 130, 64, 3)), Mix((), (1,) * 300)  # with few and with many programs
PROGRAMS = 8 * 132  # more than the GPU runs at once


@triton.jit
def _spoil_kernel(nan, out):
    i, j = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    x = tl.load(nan + i * 128 + j)
    tl.store(out + i * 128 + j, tl.dot(x, tl.trans(x)))


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[dict[tuple[object, ...], Any]]:
    """Return the compiled kernels that a test launches, by launcher."""
    found: list[dict[tuple[object, ...], Any]] = []
    for launcher in launchers():
        found.append({})
        monkeypatch.setattr(launcher, "variants", found[-1])
    return found


def assert_well_assembled(variants: list[dict[tuple[object, ...], Any]]) -> None:
    kernels = [kernel for of_launcher in variants for kernel in of_launcher.values()]
    assert kernels
    for kernel in kernels:
        code = disassembled(kernel.asm["cubin"], triton.knobs.nvidia.nvdisasm.path)
        assert code.count(";") > 50 and unwritten_reads(code) == [], kernel.name


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, and 64 KiB or more of every processor's shared memory before every launch."""
    nan = torch.full((128, 128), torch.nan, device="cuda")
    sink, launch, new_empty = torch.empty_like(nan), Launcher.__call__, Tensor.new_empty

    def spoil_and_launch(*args: Any, **options: Any) -> None:
        _spoil_kernel[(PROGRAMS,)](nan, sink)
        launch(*args, **options)

    monkeypatch.setattr(Launcher, "__call__", spoil_and_launch)
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: new_empty(*args, **options).fill_(torch.nan))


@pytest.mark.usefixtures("spoilt")
@pytest.mark.parametrize(
    ("make", "dtypes"),
    [
        pytest.param(make, (FP32, FP32), id=name, marks=() if name.endswith(QUICK) else pytest.mark.gpu_full)
        for name, make in SHAPES.items()
    ],
)
def test_fp32_results_repeat_over_spoilt_memory(
    make: Make, dtypes: Dtypes, variants: list[dict[tuple[object, ...], Any]]
) -> None:
    for mix in MIXES:
        batch = Batch(make(), mix, dtypes)
        first, differing = outcome(batch), torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(REPEATS):
            for again, once in zip(outcome(batch), first, strict=True):
                differing += (again != once).sum()
        assert differing == 0
    assert_well_assembled(variants)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_kernel_of_a_model_reads_unwritten_registers(
    case: Case, variants: list[dict[tuple[object, ...], Any]]
) -> None:
    run_once(case.make, case.dtypes)
    assert_well_assembled(variants)


@pytest.mark.parametrize("shape", ATTENTION_SHAPES.values(), ids=ATTENTION_SHAPES)
def test_no_kernel_of_attention_reads_unwritten_registers(
    shape: Shape, variants: list[dict[tuple[object, ...], Any]]
) -> None:
    batch_of(shape).run()
    assert_well_assembled(variants)
