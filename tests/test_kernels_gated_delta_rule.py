"""Accuracy of the gated delta rule against the float64 recurrence, over shapes and over inputs that are hard on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import DeltaRuleOp, Inputs, Pool, Row, assert_bitwise, plan_arrays, random, run_rows
from mambacache.kernels import StateIndices, reference

LENGTH = 150


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def prefill_error(
    op: DeltaRuleOp, inputs: Inputs, initial: Tensor | None, state_dtype: torch.dtype
) -> tuple[float, float]:
    """RMS errors of outputs and of the final state, relative to their RMS."""
    pool = Pool(op.state_shape, state_dtype)
    src, dst = pool.take(initial) if initial is not None else 0, pool.take()
    start = pool.state[src].double() if src else torch.zeros(op.state_shape, dtype=torch.float64)
    outputs, states = op.recurrence(inputs, start)
    (y,) = run_rows(op, pool, [], [(Row(len(outputs), src, (dst,), context=40), inputs)])
    return relative_error(y, outputs), relative_error(pool.state[dst], states[-1])


@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (1, 4), (3, 3)])
@pytest.mark.parametrize("widths", [(16, 16), (96, 192), (128, 128), (48, 256), (256, 64)])
def test_every_shape(heads: tuple[int, int], widths: tuple[int, int]) -> None:
    op = DeltaRuleOp(*heads, *widths)
    inputs = op.inputs(LENGTH, torch.float32)
    assert max(prefill_error(op, inputs, random(*op.state_shape, seed=7), torch.float32)) < 3e-6


def strong_decay(inputs: Inputs) -> None:
    """Log decays from -50 to almost 0, side by side."""
    inputs["a"] = torch.where(random(*inputs["a"].shape, seed=1) > 0, 50.0, -5.0).to(inputs["a"])


def extreme_decay(inputs: Inputs) -> None:
    """Log decays of -2000 beside almost 0: differences of their sums would keep two digits."""
    inputs["a"] = torch.where(random(*inputs["a"].shape, seed=1) > 0, 2000.0, -5.0).to(inputs["a"])


def steady_strong_decay(inputs: Inputs) -> None:
    inputs["a"] = torch.full_like(inputs["a"], 50.0)


def zero_keys(inputs: Inputs) -> None:
    inputs["k"][::3] = 0


def repeated_keys(inputs: Inputs) -> None:
    inputs["k"] = inputs["k"][:1].expand_as(inputs["k"]).clone()


def correlated_keys(inputs: Inputs) -> None:
    """Any two keys have a cosine of about 0.9, as keys after SiLU may."""
    directions = torch.nn.functional.normalize(inputs["k"], dim=-1)
    inputs["k"] = directions[:1] + directions / 3


def no_decay(inputs: Inputs) -> None:
    inputs["a"] = torch.full_like(inputs["a"], -30.0)


HARD = [strong_decay, extreme_decay, steady_strong_decay, zero_keys, repeated_keys, correlated_keys, no_decay]


@pytest.mark.parametrize("spoil", HARD)
@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.float64, 1e-9)])
def test_hard_inputs(spoil: Callable[[Inputs], None], beta_scale: float, dtype: torch.dtype, bound: float) -> None:
    op = DeltaRuleOp(2, 4, 64, 32, beta_scale=beta_scale)
    op.A_log = torch.zeros_like(op.A_log)
    op.dt_bias = torch.zeros_like(op.dt_bias)
    inputs = op.inputs(LENGTH, dtype)
    inputs["b"] = inputs["b"].abs() + 3  # beta near its maximum
    spoil(inputs)
    assert max(prefill_error(op, inputs, random(*op.state_shape, seed=7), dtype)) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_rounded_to_a_dtype_lose_what_that_dtype_loses(dtype: torch.dtype) -> None:
    """The precision ruler: its error is a few units in the last place of the operands, and gone in fp32."""
    op = DeltaRuleOp(2, 4, 64, 32)
    inputs: dict[str, Any] = op.inputs(LENGTH, dtype)
    zeros = torch.zeros(op.state_shape, dtype=torch.float64)
    expected = op.recurrence(inputs, zeros)[1][-1]
    errors = {}
    for operand_dtype in (None, torch.float32, dtype):
        pool = Pool(op.state_shape, torch.float32)
        dst = pool.take()
        indices = StateIndices.from_arrays(plan_arrays([], [Row(LENGTH, 0, (dst,))]), "cpu")
        reference.gated_delta_rule(
            **inputs, A_log=op.A_log, dt_bias=op.dt_bias, state=pool.state, indices=indices, operand_dtype=operand_dtype
        )
        errors[operand_dtype] = relative_error(pool.state[dst], expected)
    assert errors[None] == errors[torch.float32] < 1e-6
    unit = torch.finfo(dtype).eps
    assert unit / 16 < errors[dtype] < unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_views_give_the_same(dtype: torch.dtype) -> None:
    """q, k and v as slices of one wide tensor, as the convolution returns them."""
    op = DeltaRuleOp(2, 4, 32, 48)
    pool = Pool(op.state_shape, torch.float32)
    inputs = op.inputs(LENGTH, dtype)
    wide = torch.cat([inputs[name].flatten(1) for name in ("q", "k", "v", "a", "b")], dim=1)
    slices = wide.split([inputs[name][0].numel() for name in ("q", "k", "v", "a", "b")], dim=1)
    views = {name: view.view(inputs[name].shape) for name, view in zip(("q", "k", "v", "a", "b"), slices, strict=True)}
    blocks, outputs = [pool.take(), pool.take()], []
    for tokens, block in zip((inputs, views), blocks, strict=True):
        arrays = plan_arrays([Row(1, 0, (pool.take(),))], [Row(LENGTH - 1, 0, (block,))])
        outputs.append(op.run(tokens, pool.state, StateIndices.from_arrays(arrays, "cpu")))
    assert_bitwise(*outputs)
    assert_bitwise(*pool.state[blocks])
