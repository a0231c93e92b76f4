"""Check results that are written into the caller's `out`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import Inputs, Op, Pool, Row, assert_bitwise, bits, plan_arrays, random, run_rows
from kernel_ops import EVERY_OP_AND_DTYPE, OPS
from mambacache import kernels
from mambacache.kernels import StateIndices, gated_rms_norm, paged_attention, rms_norm
from test_kernels_contract import Scene, mixed_batch

GAPS = (0, 8, 3)  # elements between tokens; with the last gap no token is aligned


def check_out(call: Callable[..., Tensor], gap: int) -> Tensor:
    """Call with and without `out`, with `gap` elements before each of its tokens, and return `out`."""
    plain = call()
    wide = torch.full((len(plain), gap + plain[0].numel()), torch.nan, dtype=plain.dtype, device=plain.device)
    out = wide[:, gap:].unflatten(1, plain.shape[1:])
    assert call(out=out) is out
    assert_bitwise(out, plain)
    assert wide[:, :gap].isnan().all()
    return out


class _IntoOut:
    """Run an op with and without `out`. States and logs must be the same as well."""

    def __init__(self, scene: Scene, gap: int) -> None:
        self.op, self.gap = scene.op, gap
        self.slabs = [pool.slab for pool in (scene.pool, *scene.log.pools)]

    def run(self, inputs: Inputs, state: Tensor, log: Sequence[Tensor], indices: StateIndices) -> Tensor:
        starts, ends = [slab.clone() for slab in self.slabs], []

        def call(**options: Any) -> Tensor:
            for slab, start in zip(self.slabs, starts, strict=True):
                slab.copy_(start)
            y = self.op.run(inputs, state, log, indices, **options)
            ends.append([bits(slab).clone() for slab in self.slabs])
            return y

        out = check_out(call, self.gap)
        assert all(map(torch.equal, *ends))
        return out


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(("make", "dtype", "state_dtype"), EVERY_OP_AND_DTYPE)
def test_an_op_writes_its_result_into_out(
    make: Callable[[], Op], dtype: torch.dtype, state_dtype: torch.dtype, gap: int
) -> None:
    scene = mixed_batch(make(), dtype, state_dtype, 2)
    for prefills in (scene.prefills, []):
        op: Any = _IntoOut(scene, gap)
        run_rows(op, scene.pool, scene.decodes, prefills, tail=5, log=scene.log)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "group_size"), [((21, 3, 48), None), ((5, 96), 24)])
def test_gated_rms_norm_writes_its_result_into_out(
    shape: tuple[int, ...], group_size: int | None, dtype: torch.dtype, gap: int, device: str = "cpu"
) -> None:
    x, gate = (random(*shape, seed=seed, dtype=dtype).to(device) for seed in (1, 2))
    weight = random(shape[-1], seed=3).to(device, torch.float32)
    check_out(lambda **options: gated_rms_norm(x, gate, weight, 1e-5, group_size=group_size, **options), gap)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("round_normed", [True, False])
@pytest.mark.parametrize("shape", [(21, 48), (21, 3, 48), (5, 2, 3, 48)])
def test_rms_norm_writes_its_result_into_out(
    shape: tuple[int, ...], round_normed: bool, gap: int, device: str = "cpu"
) -> None:
    x = random(*shape, seed=1, dtype=torch.float16).to(device)
    weight = random(shape[-1], seed=2, dtype=torch.float32).to(device)  # with `round_normed` the result is fp32 too
    check_out(lambda **options: rms_norm(x, weight, 1e-5, round_normed=round_normed, **options), gap)


@pytest.mark.parametrize("gap", GAPS)
def test_paged_attention_writes_its_result_into_out(gap: int) -> None:
    rows = [Row(2, 1, context=3, pages=(2,)), Row(0)], [Row(5, 1, 1, pages=(1,))]
    indices = StateIndices.from_arrays(plan_arrays(*rows, num_tokens=11, block_size=16), "cpu")
    q, k, v = (random(11, *shape, seed=i, dtype=torch.float32) for i, shape in enumerate(((4, 16), (2, 16), (2, 8))))
    keys, values = (random(3, 16, 2, width, seed=width, dtype=torch.float32) for width in (16, 8))
    out = check_out(lambda **options: paged_attention(q, k, v, keys, values, indices, **options), gap)
    assert out.shape == (11, 4, 8) and out[[0, 1, *range(4, 9)]].all() and not out[[2, 3, 9, 10]].any()


REFUSED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda y: y[:-1], "out has shape"),
    (lambda y: y.double(), "out is float64 where float32 is needed"),
    (
        lambda y: torch.cat([y, y], -1)[..., ::2],
        "Every token of out must be contiguous: only the stride between tokens",
    ),
    (lambda y: y[:1].expand_as(y), "Tokens of out must not overlap, but they start 0 elements apart"),
    (lambda y: y.to("meta"), "out is on meta, but"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
@pytest.mark.parametrize("make", OPS.values(), ids=OPS.keys())
def test_an_unfit_out_is_refused(make: Callable[[], Op], change: Callable[[Tensor], Tensor], message: str) -> None:
    op = make()
    pool = Pool(op.state_shape, torch.float32)
    indices = StateIndices.from_arrays(plan_arrays([], [Row(3, 0, 1)]), "cpu")
    inputs = op.inputs(3, torch.float32)
    y = op.run(inputs, pool.state, (), indices)
    with pytest.raises(ValueError, match=message):
        op.run(inputs, pool.state, (), indices, out=change(y))


@pytest.mark.parametrize(("change", "message"), REFUSED)
@pytest.mark.parametrize("op", ["gated_rms_norm", "rms_norm", "paged_attention"])
def test_an_unfit_out_is_refused_without_a_state(op: str, change: Callable[[Tensor], Tensor], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(3, 32),
        "gate": torch.zeros(3, 32),
        "weight": torch.ones(32),
        "eps": 0,
    }
    if op == "paged_attention":
        indices = StateIndices.from_arrays(plan_arrays([], [Row(3, 0, 1, pages=(1,))], block_size=16), "cpu")
        arguments = {name: torch.zeros(3, 2, 16) for name in "qkv"} | {"indices": indices}
        arguments |= {name: torch.zeros(2, 16, 2, 16) for name in ("key_pages", "value_pages")}
    elif op == "rms_norm":
        arguments = {"x": torch.zeros(3, 32), "weight": None, "eps": 0, "round_normed": True}
    function = getattr(kernels, op)
    with pytest.raises(ValueError, match=message):
        function(**arguments, out=change(function(**arguments)))
