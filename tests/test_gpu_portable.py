"""Run the kernels of GPUs other than Hopper on a Hopper: accuracy, results equal in every bit, contract, and engines.

`test_gpu_accuracy`, `test_gpu_bitwise`, `test_gpu_contract` and others run such cases with a Hopper's own kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import test_gpu_contract as contract
import test_gpu_graphs as graphs
import test_gpu_paged_attention as attention
from engine_driver import Engines, Original, ask, greedy, hits, tokens_of
from gpu_cases import BF16, DTYPES, FP32, MIXES, MODELS, SHARED_BY, Batch, Case, served_as
from kernel_ops import EVERY_HARD_CASE, FAMILIES
from test_gpu_accuracy import HARD_MIX, HARD_SLACK, SLACK, check
from test_gpu_bitwise import MANY, MIXED, first_shape, many_processors, no_processors, outcome
from test_gpu_contract import pools_on_the_gpu  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

GPUS = ("sm80", "sm120")  # with large tiles; with small tiles, and with launches that overlap
TILED = ("gated_delta_rule", "kda", "ssd")
BY_MEMORY = ("gated_delta_rule", "kda")  # on the second GPU prefill of others has the kernels of the first
ON_EACH = [(gpu, op) for gpu in GPUS for op in MODELS if gpu == GPUS[0] or op in BY_MEMORY]
ATTENTION = [(gpu, name) for gpu in GPUS for name in ("grouped, drafts", "wide", "latent", "small pages", "fp32")]
ENGINES = [(gpu, model) for gpu in GPUS for model in ("qwen3_next", "kimi_linear", "falcon_h1")]


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose kernels as on a GPU of this capability."""
    with served_as(request.param):
        yield request.param


def on_each(name: str, pairs: Sequence[tuple[str, object]]) -> pytest.MarkDecorator:
    """Parametrize a test with GPUs and values. Tests of a pair compile the same kernels, so a worker runs them all."""
    values = [
        pytest.param(gpu, value, id=f"{gpu}-{value}", marks=pytest.mark.xdist_group(f"{gpu}-{value}"))
        for gpu, value in pairs
    ]
    return pytest.mark.parametrize(("gpu", name), values, indirect=["gpu"])


def real_cases(op: str) -> list[Case]:
    """Return every model in the usual dtypes, and the first model in fp16, in fp32 and with many rows."""
    usual, first = DTYPES[op][0], next(iter(MODELS[op]))
    others = {dtypes[0]: dtypes for dtypes in DTYPES[op][1:] if dtypes[0] != BF16}
    cases = [Case(op, model, SHARED_BY[model], "mixed, drafts", usual) for model in MODELS[op]]
    cases += [Case(op, first, 8, "mixed, drafts", dtypes) for dtypes in others.values()]
    return [*cases, Case(op, first, 8, "64 x 128", usual)] if op in TILED else cases


@pytest.mark.usefixtures("compiled")
@on_each("case", [(gpu, case) for gpu, op in ON_EACH for case in real_cases(op)])
def test_accuracy_on_real_shapes(case: Case) -> None:
    check(Batch(case.make(), MIXES[case.mix], case.dtypes), case.dtypes)


@on_each("name", [(gpu, f"{op}-{name}") for gpu, op in ON_EACH if op in FAMILIES for name in [*FAMILIES[op].HARD][:2]])
def test_accuracy_on_hard_inputs(name: str) -> None:
    batch = Batch(EVERY_HARD_CASE[name](), HARD_MIX, (BF16, FP32))
    check(batch, (BF16, FP32), HARD_SLACK.get(batch.op.name, SLACK))


@on_each("op", ON_EACH)
def test_a_large_batch_repeats_itself(op: str) -> None:
    make, dtypes = first_shape(op, 8)
    batch = Batch(make(), MANY, dtypes)
    first = outcome(batch)
    for _ in range(20):
        assert all(torch.equal(again, once) for again, once in zip(outcome(batch), first, strict=True))


@on_each("op", [(gpu, op) for gpu, op in ON_EACH if op in TILED])
def test_few_and_many_processors_give_the_same(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, dtypes = first_shape(op, 8)
    batch = Batch(make(), MIXED, dtypes)
    first = outcome(batch)
    for processors in (no_processors, many_processors):
        monkeypatch.setattr(sys.modules[f"mambacache.kernels.gpu.{op}.prefill"], "processors", processors)
        assert all(torch.equal(again, once) for again, once in zip(outcome(batch), first, strict=True))


@pytest.mark.usefixtures("pools_on_the_gpu")
@on_each("op", ON_EACH)
def test_a_row_does_not_depend_on_its_batch_or_its_hit(op: str) -> None:
    make, (dtype, state_dtype) = first_shape(op, 8)
    for name in ("company", "split after a hit"):
        contract.SHARED[name](make=make, dtype=dtype, state_dtype=state_dtype)


@on_each("name", ATTENTION)
def test_attention(name: str) -> None:
    attention.test_accuracy(attention.SHAPES[name])
    attention.test_a_row_does_not_depend_on_its_batch(attention.SHAPES[name])


@on_each("model", ENGINES)
def test_an_engine_answers_as_the_original(
    model: str, tiny_model: Callable[[str], Path], original: Callable[[str], Original]
) -> None:
    """Check answers without a hit and after hits in fp32, and in decode graphs every bit."""
    shared = tokens_of(1, 200)
    prompts = [[*shared, *tokens_of(seed, 90)] for seed in (2, 3, 4, 2)]
    with Engines(tiny_model, "cuda") as engines:
        outputs = ask(engines(model), prompts, greedy(20), together=False)
    engines.check()
    assert hits(outputs) == [0, 0, 192, 256]
    original(model).check_all(prompts, outputs)
    graphs.test_a_replay_is_bitwise_the_same_step_without_a_graph(model, tiny_model)
