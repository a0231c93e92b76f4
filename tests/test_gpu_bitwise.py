"""Check that results of the GPU kernels are equal in every bit: in any batch, in every run, and in any tiles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_cases import BF16, DTYPES, FP32, MODELS, Batch, Dtypes, Make, Mix, delta_rule
from kernel_cases import bits, int32, plan_arrays
from mambacache.kernels import StateIndices
from mambacache.kernels.gpu.common.chunks import keep_busy
from op_gated_delta_rule import harden
from op_kda import KDAOp, uneven_decay
from op_selective_scan import SelectiveScanOp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]

MIXED = Mix((1, 3, 2, 1), (200, 3, 64, 65, 1))
MANY = Mix((1,) * 200, (130,) * 64)


def no_processors(index: int) -> int:
    return 0


def four_processors(index: int) -> int:
    """Return 4: each processor has several tiles, and as much to do as the others."""
    return 4


def thirteen_processors(index: int) -> int:
    """Return 13: some processors have much more to do than others."""
    return 13


def many_processors(index: int) -> int:
    return 1 << 20


# Names in a module that choose tiles, and values that must all give the same results.
TILES: dict[str, dict[tuple[str, str], tuple[object, ...]]] = {
    "conv1d": {
        ("conv1d", "BLOCK_D"): (256, 512, 1024, 2048),
        ("conv1d", "UNROLL"): (4, 8),
        ("conv1d", "STAGES"): (1, 3),
    },
    "gated_delta_rule": {
        ("gated_delta_rule.prefill", "processors"): (
            no_processors,
            four_processors,
            thirteen_processors,
            many_processors,
        ),
        ("common.log", "REGISTERS"): (0, 1 << 12, 1 << 13),
        ("common.fold", "PROGRAMS"): (1, 1 << 30),
    },
    "ssd": {
        ("ssd.prefill", "processors"): (no_processors, many_processors),
        ("common.log", "REGISTERS"): (0, 1 << 12, 1 << 13),
        ("ssd.decode", "MAX_HEADS"): (1, 8, 32),
        ("common.fold", "PROGRAMS"): (1, 1 << 30),
    },
    "kda": {
        ("kda.prefill", "processors"): (no_processors, four_processors, thirteen_processors, many_processors),
        ("common.log", "REGISTERS"): (0, 1 << 12, 1 << 13),
        ("kda.fold", "PROGRAMS"): (1, 1 << 30),
    },
    "selective_scan": {
        ("selective_scan.prefill", "SHORT_CHAIN_WARPS"): (0, 1 << 30),
        ("selective_scan.decode", "LANES"): (1, 2),
    },
}
# No model has these shapes. They have choices of tiles of their own.
MORE_SHAPES: dict[str, tuple[Make, ...]] = {"selective_scan": (partial(SelectiveScanOp, 616, 32),)}
FIRST = {op: next(iter(models.values())) for op, models in MODELS.items()}


def first_shape(op: str, divisor: int) -> tuple[Make, Dtypes]:
    return FIRST[op](divisor), DTYPES[op][0]


def outcome(batch: Batch) -> list[Tensor]:
    """Return the bits of the outputs, of the whole pool and of the token log, after a run on copies of pool and log."""
    slabs = [batch.pool.slab.clone(), *batch.log.slabs()]
    y = batch.run(batch.pool.view(slabs[0]), batch.log.views(slabs[1:]))
    return [bits(each) for each in (y, *slabs)]


@pytest.mark.parametrize("op", MODELS)
def test_a_thousand_runs_of_a_batch_are_equal(op: str) -> None:
    make, dtypes = first_shape(op, 8)
    batch = Batch(make(), MIXED, dtypes)
    first, differing = outcome(batch), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for again, once in zip(outcome(batch), first, strict=True):
            differing += (again != once).sum()
    assert differing == 0


@pytest.mark.parametrize("op", MODELS)
@pytest.mark.parametrize("divisor", [1, 8])
def test_a_large_batch_repeats_itself(op: str, divisor: int) -> None:
    make, dtypes = first_shape(op, divisor)
    batch = Batch(make(), MANY, dtypes)
    first = outcome(batch)
    for _ in range(20):
        assert all(torch.equal(again, once) for again, once in zip(outcome(batch), first, strict=True))


CHOICES = [
    pytest.param(op, shape, *constant, value, id=f"{op}-{shape}-{constant[1]}-{getattr(value, '__name__', value)}")
    for op, constants in TILES.items()
    for constant, values in constants.items()
    for value in values
    for shape in range(1 + len(MORE_SHAPES.get(op, ())))
]  # one at a time: each choice compiles kernels of its own


@pytest.mark.parametrize(("op", "shape", "module", "name", "value"), CHOICES)
@pytest.mark.parametrize("dtypes", [(BF16, FP32), pytest.param((FP32, FP32), marks=pytest.mark.gpu_full)], ids=str)
def test_every_choice_of_tiles_gives_the_same(
    op: str, shape: int, module: str, name: str, value: object, dtypes: Dtypes, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = (first_shape(op, 4)[0], *MORE_SHAPES.get(op, ()))[shape]
    batch = Batch(make(), MIXED, dtypes if op != "conv1d" else (dtypes[0], dtypes[0]))
    first = outcome(batch)
    monkeypatch.setattr(sys.modules[f"mambacache.kernels.gpu.{module}"], name, value)
    assert all(torch.equal(again, once) for again, once in zip(outcome(batch), first, strict=True))


# The widths fill no tile, or split a head's values into several tiles. Rows end anywhere in a chunk.
WIDTHS: dict[str, Make] = {
    "delta 48 x 80": delta_rule(2, 4, 48, 80, 1.0, 1),
    "delta 128 x 192": delta_rule(2, 4, 128, 192, 1.0, 1),
    "delta 16 x 256": delta_rule(2, 4, 16, 256, 1.0, 1),
    "kda 48 x 80": partial(KDAOp, 4, 48, 80),
    "kda 128 x 192": partial(KDAOp, 4, 128, 192),
    "kda 16 x 256": partial(KDAOp, 4, 16, 256),
    "kda 64 x 64": partial(KDAOp, 4, 64, 64),
    # Only some chunks have strong decays: a chunk may differ from the chunk before.
    "kda 128 x 80, strong decays": partial(harden, partial(KDAOp, 4, 128, 80), uneven_decay),
}
ENDS = Mix(prefills=(1, 3, 5, 9, 17, 23, 37, 50, 63, 64, 65, 127, 130, 191, 200, 330))


@pytest.mark.parametrize("make", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16)], ids=str)
def test_prefill_on_few_and_on_many_processors_gives_the_same_for_every_width(
    make: Make, dtypes: Dtypes, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(make(), ENDS, dtypes)
    prefill = sys.modules[f"mambacache.kernels.gpu.{batch.op.name}.prefill"]
    tiles = batch.op.state_shape[0] * -(-batch.op.state_shape[1] // 128)
    busy = [keep_busy(batch.indices, tiles, count(0)) for count in (four_processors, thirteen_processors)]
    assert busy == [True, False]  # both forms of the gated delta rule run
    monkeypatch.setattr(prefill, "processors", many_processors)
    first = outcome(batch)
    for processors in (no_processors, four_processors, thirteen_processors):
        monkeypatch.setattr(prefill, "processors", processors)
        for _ in range(20):
            assert all(torch.equal(again, once) for again, once in zip(outcome(batch), first, strict=True))


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda", "ssd"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_no_program_reads_scratch_before_it_is_prepared(op: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the memory that a launch's programs leave each other with NaN before the launch."""
    make, dtypes = first_shape(op, 1)
    batch = Batch(make(), Mix((tokens,) * 64), dtypes, padding=0)
    first = outcome(batch)
    decode = sys.modules["mambacache.kernels.gpu." + ("ssd.decode" if op == "ssd" else "common.delta_decode")]
    scratch = decode.scratch

    def poisoned(like: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return tuple(x.fill_(torch.nan) for x in scratch(like, sizes))

    monkeypatch.setattr(decode, "scratch", poisoned)
    for _ in range(100):
        assert all(torch.equal(again, once) for again, once in zip(outcome(batch), first, strict=True))
        assert not batch.indices.arrivals.any()


@pytest.mark.parametrize("op", MODELS)
def test_a_replayed_graph_follows_its_indices(op: str) -> None:
    """Capture decode once, with null rows, and replay it with other rows in the same buffers, some of them padding.

    The replay must give the results of these rows without a graph.
    """
    make, dtypes = first_shape(op, 4)
    batch = Batch(make(), Mix((2,) * 8), dtypes, padding=0)
    batch.run()
    buffers = StateIndices.decode_buffers(12, 2, "cuda")
    batch.indices = buffers.fill({}, 8)
    slabs = [batch.pool.slab.clone(), *batch.log.slabs()]
    views = batch.pool.view(slabs[0]), batch.log.views(slabs[1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = batch.run(*views)
    rng = np.random.default_rng(3)
    for padding in (0, 3, 8):
        rows = [batch.decodes[i] for i in rng.permutation(8)[padding:]]
        rows[1::2] = [replace(row, length=1, width=2) for row in rows[1::2]]
        arrays = plan_arrays(rows, [])
        batch.indices = StateIndices.from_arrays(arrays | {"tokens": int32([0] * 16)}, "cuda")
        expected, *wanted = outcome(batch)
        for slab, start in zip(slabs, (batch.pool.slab, *batch.log.slabs()), strict=True):
            slab.copy_(start)
        buffers.fill(arrays, 8)
        graph.replay()
        assert torch.equal(bits(y), expected)
        assert all(torch.equal(bits(slab), its) for slab, its in zip(slabs, wanted, strict=True))
        assert not y[2 * (8 - padding) :].any()
