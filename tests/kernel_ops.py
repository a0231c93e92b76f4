"""The ops that all tests of ops run through: a new one adds a file like `op_gated_delta_rule` and rows here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import op_gated_delta_rule
import op_kda
import op_selective_scan
import op_ssd
from kernel_cases import Op, Recurrence
from op_conv1d import Conv1dOp
from op_gated_delta_rule import DeltaRuleOp
from op_kda import KDAOp
from op_selective_scan import SelectiveScanOp
from op_ssd import SsdOp
from selection import FULL

OPS: dict[str, Callable[[], Op]] = {
    "conv1d": Conv1dOp,
    "conv1d_plain": partial(Conv1dOp, dim=40, width=2, bias=False, activation=None),
    "short_conv": partial(Conv1dOp, dim=40, width=3, bias=False, activation=None, gated=True),
    "gated_delta_rule": DeltaRuleOp,
    "gated_delta_rule_negative": partial(DeltaRuleOp, value_heads=2, key_width=16, value_width=48, beta_scale=2.0),
    "kda": KDAOp,
    "kda_uneven": op_kda.uneven,
    "selective_scan": SelectiveScanOp,
    "selective_scan_plain": partial(SelectiveScanOp, dim=24, width=8, plain=True),
    "ssd": SsdOp,
    "ssd_plain": partial(SsdOp, groups=1, heads=3, width=32, state_width=16, plain=True, dt_limit=(0.3, 1.5)),
}

MAIN = ("conv1d", "gated_delta_rule", "kda", "selective_scan", "ssd")
EVERY_OP_AND_DTYPE = [
    pytest.param(
        make,
        *dtypes,
        id="-".join([name, *(str(dtype).removeprefix("torch.") for dtype in dtypes)]),
        marks=() if dtypes[0] == torch.float32 or (name in MAIN and dtypes == make().state_dtypes[1]) else FULL,
    )
    for name, make in OPS.items()
    for dtypes in make().state_dtypes
]

FAMILIES = {"gated_delta_rule": op_gated_delta_rule, "kda": op_kda, "selective_scan": op_selective_scan, "ssd": op_ssd}
"""For a recurrence in `OPS` its file, with `SHAPES` that a model may have, inputs `HARD` on its accuracy, and arguments
that are `REFUSED`."""

EVERY_SHAPE: dict[str, Callable[[], Recurrence]] = {
    f"{name}-{shape}": make for name, family in FAMILIES.items() for shape, make in family.SHAPES.items()
}
EVERY_HARD_CASE: dict[str, Callable[[], Recurrence]] = {
    f"{name}-{case}": make for name, family in FAMILIES.items() for case, make in family.HARD.items()
}
EVERY_REFUSAL = [
    pytest.param(OPS[name], changes, message, id=f"{name}-{message}")
    for name, family in FAMILIES.items()
    for changes, message in family.REFUSED
]
RULERS: dict[str, Callable[[], Recurrence]] = {
    "gated_delta_rule": partial(DeltaRuleOp, 2, 4, 64, 32),
    "kda": partial(KDAOp, 2, 64, 32),
    "ssd": SsdOp,
}
"""Ops whose reference can round the operands of its products."""
