"""Check the launches and compilations of the GPU ops, and offsets beyond 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
import triton
from torch.profiler import ProfilerActivity, profile

import test_kernels_rms_norm as norm
from gpu_cases import BF16, COMPILED_MIXES, DTYPES, MODELS, Batch, Mix
from kernel_cases import Log, Pool, Row, assert_bitwise, plan_arrays, random, run_rows
from mambacache.kernels import StateIndices, rms_norm
from mambacache.kernels.gpu.common import layout
from op_conv1d import Conv1dOp
from test_gpu_accuracy import check
from test_gpu_bitwise import first_shape

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]

# The most launches for decode rows, for prefill rows, and for both.
LAUNCHES = {
    "gated_delta_rule": (2, 2, 4),
    "kda": (2, 2, 4),
    "conv1d": (1, 1, 1),
    "selective_scan": (1, 1, 2),
    "ssd": (2, 2, 4),
}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the names of the kernels that Triton compiles. No strides of layers are known from other tests."""
    names: list[str] = []

    def note(*, fn: object, **rest: object) -> None:
        names.append(str(fn))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    monkeypatch.setattr(layout, "_seen", set())
    monkeypatch.setattr(layout, "_token_strides", {})
    yield names


def random_mix(rng: np.random.Generator) -> Mix:
    width = int(rng.integers(1, 9))
    decodes = rng.integers(1, width + 1, rng.choice([0, 1, 2, 15, 16, 17, 64]))
    prefills = rng.integers(1, rng.choice([2, 40, 700]), rng.choice([0, 1, 2, 16, 33]))
    if not len(decodes) and not len(prefills):
        return Mix((), (1,))
    return Mix(tuple(map(int, decodes)), tuple(map(int, prefills)))


@pytest.mark.parametrize("op", MODELS)
def test_no_step_compiles_after_warm_up(op: str, compilations: list[str]) -> None:
    make, dtypes = first_shape(op, 8)
    for mix in (*COMPILED_MIXES, Mix((2, 1)), Mix((), (70, 3)), Mix((1, 1), (70, 3))):
        Batch(make(), mix, dtypes).run()
    compilations.clear()
    rng = np.random.default_rng(0)
    for seed in range(200):
        Batch(make(), random_mix(rng), dtypes, seed, padding=int(rng.choice([0, 3]))).run()
    assert compilations == []


def test_a_compilation_is_counted(compilations: list[str]) -> None:
    Batch(Conv1dOp(dim=24, width=2), Mix((1,)), DTYPES["conv1d"][0]).run()
    assert len(compilations) == 1


def launched(call: Callable[[], object]) -> list[str]:
    """Return the names of all work of a call on the GPU, copies and fills included."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        call()
        torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def is_ours(name: str) -> bool:
    return name.startswith("_") and name.endswith("_kernel")


@pytest.mark.parametrize("op", MODELS)
@pytest.mark.parametrize(("kind", "mix"), enumerate([Mix((1,) * 8), Mix((), (200, 64)), Mix((3, 1), (200, 64))]))
def test_an_op_launches_its_kernels_and_copies_nothing(op: str, kind: int, mix: Mix) -> None:
    make, dtypes = first_shape(op, 2)
    names = launched(Batch(make(), mix, dtypes, padding=0).run)
    assert 0 < len(names) <= LAUNCHES[op][kind], names
    assert all(map(is_ours, names)), names


@pytest.mark.parametrize("view", ["dense", "split", "chunk", "heads"])
def test_a_norm_is_a_single_launch_and_no_batch_compiles_anew(view: str, compilations: list[str]) -> None:
    weight = norm.norm_weight(256, BF16, "cuda")
    for tokens in (7, 1, 2, 16, 17, 333):
        x = norm.norm_input(view, tokens, 256, BF16, "cuda")
        names = launched(partial(rms_norm, x, weight, 1e-6, round_normed=True))
        assert len(names) == 1 and is_ours(names[0]), names
        if tokens == 7:
            compilations.clear()
    assert compilations == []


def test_the_profile_sees_a_planted_copy() -> None:
    make, dtypes = first_shape("gated_delta_rule", 2)
    batch = Batch(make(), Mix((1,)), dtypes, padding=0)

    def copy_and_run() -> None:
        batch.pool.state[1] = batch.pool.state[2]
        batch.run()

    assert not all(map(is_ours, launched(copy_and_run)))


@pytest.mark.xdist_group("memory 0")  # one at a time
@pytest.mark.parametrize("op", MODELS)
def test_slots_at_the_end_of_a_pool_of_more_than_two_billion_elements(op: str) -> None:
    make, dtypes = first_shape(op, 1)
    one = make()
    pool = Pool(one.state_shape, dtypes[1], blocks=(2**31 + 2**28) // int(np.prod(one.state_shape)), device="cuda")
    small = Pool(one.state_shape, dtypes[1], blocks=8, device="cuda")
    start, last = random(*one.state_shape, seed=1), pool.shape[0] - 1
    outputs, states = [], []
    for target, blocks in ((small, [7, 6, 5, 4]), (pool, [last, last - 1, last - 2, last - 3])):
        src, dst, checkpoint, end = blocks
        target.state[src] = start.to(dtypes[1])
        log = Log(one, target, dtypes[0], 2)
        token, prompt = one.inputs(1, dtypes[0], seed=1), one.inputs(100, dtypes[0], seed=2)
        prefill = Row(100, src, end, context=64, checkpoints={128: checkpoint})
        decode = Row(1, src, dst, log_slot=log.take())
        outputs.append(run_rows(one, target, [(decode, token)], [(prefill, prompt)], log=log))
        states.append(target.state[[dst, checkpoint, end]])
        assert target.state[0].isnan().all()
    assert_bitwise(*states)
    for small_output, large_output in zip(*outputs, strict=True):
        assert_bitwise(small_output, large_output)


@pytest.mark.xdist_group("memory 0")  # one at a time
@pytest.mark.parametrize("op", MODELS)
def test_slots_at_the_end_of_a_log_of_more_than_two_billion_elements(op: str) -> None:
    make, dtypes = first_shape(op, 1)
    one = make()
    pool = Pool(one.state_shape, dtypes[1], blocks=4, device="cuda")
    src, found = pool.take(random(*one.state_shape, seed=1)), []
    largest = max(int(np.prod(each.shape)) for each in one.log_layout(*dtypes))
    for slots in (4, (2**31 + 2**28) // largest):
        log, dst = Log(one, pool, dtypes[0], slots), pool.take()
        outputs = []
        for t, target in enumerate((0, dst)):
            row = Row(1, src, target, log_slot=slots - 1, log_end=t)
            outputs += run_rows(one, pool, [(row, one.inputs(1, dtypes[0], seed=t))], log=log)
        found.append([*outputs, pool.state[dst], *(tensor[slots - 1, :2] for tensor in log.tensors)])
        assert all(tensor[0].isnan().all() for tensor in log.tensors if tensor.is_floating_point())
    for small, large in zip(*found, strict=True):
        assert_bitwise(small, large)


@pytest.mark.xdist_group("memory 0")  # one at a time
@pytest.mark.parametrize("op", MODELS)
def test_tokens_beyond_two_billion_elements(op: str) -> None:
    """The last of many rows equals the same row alone."""
    make, dtypes = first_shape(op, 1)
    one = make()
    samples = one.inputs(64, dtypes[0])
    width = max(int(np.prod(x.shape[1:])) for x in samples.values())
    rows = (2**31 + 2**25) // width // 64
    pool = Pool(one.state_shape, dtypes[1], blocks=4, device="cuda")
    first, second = pool.take(), pool.take()
    alone = run_rows(one, pool, [], [(Row(64, 0, first), samples)])[0]
    arrays = plan_arrays([], [*[Row(64)] * (rows - 1), Row(64, 0, second)])
    inputs = {name: x.cuda().repeat(rows, *[1] * (x.dim() - 1)) for name, x in samples.items()}
    y = one.run(inputs, pool.state, (), StateIndices.from_arrays(arrays, "cuda"))
    assert_bitwise(y[-64:].cpu(), alone)
    assert_bitwise(pool.state[second], pool.state[first])


@pytest.mark.parametrize("op", MODELS)
def test_unaligned_activations(op: str) -> None:
    """Views with tokens at odd addresses take kernels of their own, which may add in another order."""
    make, dtypes = first_shape(op, 8)
    batch = Batch(make(), Mix((1, 2), (70,)), dtypes)
    flat = [x.flatten(1) for x in batch.inputs.values()]
    wide = torch.cat([flat[0][:, :1], *flat], dim=1)
    views = wide[:, 1:].split([x.shape[1] for x in flat], dim=1)
    batch.inputs = {name: v.unflatten(1, x.shape[1:]) for (name, x), v in zip(batch.inputs.items(), views, strict=True)}
    check(batch, dtypes)
