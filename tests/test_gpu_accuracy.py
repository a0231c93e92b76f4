"""Check the GPU kernels' accuracy on real shapes and hard inputs, and their writes, in a pool full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial

import pytest
import torch
from _pytest.mark import ParameterSet

from gpu_cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    INDIVISIBLE,
    MIXES,
    MODELS,
    SHARED_BY,
    Batch,
    Case,
    Dtypes,
    Mix,
    errors_and_ruler,
    every_case,
    pairwise_cases,
)
from kernel_cases import Inputs, Op, Recurrence
from kernel_ops import EVERY_HARD_CASE, FAMILIES, RULERS
from mambacache.kernels import reference
from op_gated_delta_rule import DeltaRuleOp, TokenRows, zero_keys
from op_kda import KDAOp
from test_kernels_accuracy import WORST_TOKEN, errors, run_decode, run_prefill

SLACK = 5e-7  # four units in the last place of fp32, which elementary functions alone may lose
# A scan multiplies by a rounded decay at each token, and rounds it the same way where all steps are equal. Each of a
# row's 150 tokens may then lose a unit in the last place below 1, 2^-24.
HARD_SLACK = {"selective_scan": 150 * 2**-24}

GRID = [case for op in MODELS for case in every_case(op)]
# Their references take seconds, so only the whole grid has them in other than the usual dtypes.
LONG = ("1 x 8192", "1 x 33000")
CHOSEN = [
    case
    for op in MODELS
    for case in pairwise_cases(
        [
            c
            for c in every_case(op)
            if c.divisor in (1, SHARED_BY[c.model]) and (c.mix not in LONG or c.dtypes == DTYPES[op][0])
        ]
    )
]
HARD_CASES = {f"{op}-{name}": make for op in MODELS if op in FAMILIES for name, make in FAMILIES[op].HARD.items()}
WATCHED = {name: make for name, make in EVERY_HARD_CASE.items() if name.split("-")[0] in RULERS} | {
    f"{op}-{model}": MODELS[op][model](8) for op in RULERS for model in MODELS[op] if (model, 8) not in INDIVISIBLE
}
HARD_MIX = Mix((4, 1), (150, 64))
LARGE = {
    "gated_delta_rule": ("q", "k", "v"),
    "kda": ("q", "k", "v"),
    "conv1d": ("x",),
    "selective_scan": ("x",),
    "ssd": ("x",),
}  # inputs that may be of any magnitude


def heavy_apart(cases: list[Case]) -> list[ParameterSet]:
    """Run cases one at a time if their references in float64 need most memory."""
    heavy = [c for c in cases if c.mix == "1 x 33000" or (c.mix == "batch 512" and c.divisor <= 4)]
    light = [pytest.param(c) for c in cases if c not in heavy]
    return [pytest.param(c, marks=pytest.mark.xdist_group("memory 1")) for c in heavy] + light


def check(batch: Batch, dtypes: Dtypes, slack: float = SLACK) -> None:
    """Check that errors are at most twice the reference's with rounded operands, three times in fp32."""
    factor = 3 if dtypes[0] == FP32 else 2
    for what, (error, ruler) in errors_and_ruler(batch).items():
        assert error <= factor * ruler + slack, f"{what}: {error:.2e}, but the ruler loses {ruler:.2e}"


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", heavy_apart(CHOSEN), ids=str)
def test_real_shapes(case: Case) -> None:
    check(Batch(case.make(), MIXES[case.mix], case.dtypes), case.dtypes)


@pytest.mark.gpu_full
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", heavy_apart(GRID), ids=str)
def test_every_real_shape(case: Case) -> None:
    check(Batch(case.make(), MIXES[case.mix], case.dtypes, seed=1), case.dtypes)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "dtypes", [(BF16, FP32), pytest.param((FP16, FP16), marks=pytest.mark.gpu_full), (FP32, FP32)], ids=str
)
@pytest.mark.parametrize("make", HARD_CASES.values(), ids=HARD_CASES.keys())
def test_hard_inputs(make: Callable[[], Op], dtypes: Dtypes) -> None:
    batch = Batch(make(), HARD_MIX, dtypes)
    check(batch, dtypes, HARD_SLACK.get(batch.op.name, SLACK))


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("dtype", "state_dtype"), [(FP32, FP32)])
@pytest.mark.parametrize("make", WATCHED.values(), ids=WATCHED.keys())
def test_no_token_is_much_worse_than_in_the_recurrence(
    make: Callable[[], Recurrence], dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Compare chunks on the GPU with the reference's recurrence. (Truncated sums made some 17 times worse.)"""
    *_, worst_of_chunked = errors(make(), dtype, run_prefill, "cuda")
    *_, worst_of_recurrent = errors(make(), dtype, run_decode)
    assert worst_of_chunked < WORST_TOKEN * worst_of_recurrent + SLACK


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "case", [case for case in GRID if case.mix == "varlen" and case.divisor == SHARED_BY[case.model]], ids=str
)
def test_large_inputs(case: Case) -> None:
    """Squares of the values stay below 1e30, or below 6e4 where a dtype is fp16."""
    batch = Batch(case.make(), HARD_MIX, case.dtypes)
    for name in LARGE[case.op]:
        batch.inputs[name].mul_(30 if FP16 in case.dtypes else 1e13)
    check(batch, case.dtypes)


def small_keys(inputs: Inputs, gate: str) -> None:
    """Scale keys so that their squared norms are a hundredth of the epsilon that is added to them."""
    inputs["k"] = inputs["k"] * 1e-5


def betas_of_one(inputs: Inputs, gate: str) -> None:
    inputs["b"] = torch.full_like(inputs["b"], 30.0)


SPOILED = {"normal": None, "beta 1": betas_of_one, "small keys": small_keys, "zero keys": zero_keys}
ROWS_OF_BRANCH = {"tiles of 64 rows": (1, 192), "tiles of 128 rows": (40, 64), "busy processors": (140, 64)}
# Floors of the reference's relative error, for states of ordinary size and for scaled states. KDA rounds the operands
# of products of two tokens, so an output is less exact if it is a small difference of such products. With a floor of
# 1/16 in place of 1/14, one token with zeros among its keys had 3.1 times the error on an H200.
FLOORS = {"kda": (2**-6, 1 / 14), "gated_delta_rule": (2**-7, 2**-7)}
DELTA_RULES = {"kda": partial(KDAOp, 8, 128, 128), "gated_delta_rule": partial(DeltaRuleOp, 8, 8, 128, 128)}


@pytest.mark.gpu
@pytest.mark.parametrize("strided", [False, pytest.param(True, marks=pytest.mark.gpu_full)], ids=["dense", "strided"])
@pytest.mark.parametrize("scales", [(1.0,), (1e20, 1e-30)], ids=["", "scaled states"])
@pytest.mark.parametrize(("rows", "length"), ROWS_OF_BRANCH.values(), ids=ROWS_OF_BRANCH.keys())
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
@pytest.mark.parametrize("op", [make() for make in DELTA_RULES.values()], ids=DELTA_RULES.keys())
def test_no_token_is_much_worse_than_in_chunks_with_rounded_operands(
    op: DeltaRuleOp,
    spoil: Callable[[Inputs, str], None] | None,
    rows: int,
    length: int,
    scales: tuple[float, ...],
    strided: bool,
) -> None:
    """Check in bf16, for gates without a bias, that each token has at most three times the reference's error.

    A token with a zero key is left out: its output has products with other tokens alone.
    """
    op = copy(op)
    op.spoil = spoil
    op.parameters = op.parameters | {name: torch.zeros_like(op.parameters[name]) for name in ("A_log", "dt_bias")}
    inputs = op.inputs(rows * length, BF16)
    tokens = TokenRows(op, rows, inputs, scales, "cuda", strided)
    ruler = tokens.errors(reference, operand_dtype=BF16)
    ratios = tokens.errors() / ruler.clamp(min=FLOORS[op.name][len(scales) - 1])
    ratios = ratios[inputs["k"].any(-1).to("cuda")]
    assert ratios.max() <= 3, f"{float(ratios.max()):.1f} times in the worst of {int((ratios > 3).sum())} tokens"
