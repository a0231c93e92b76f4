"""Hold the shapes of real models, the mixes of rows, and the batches that tests of GPU kernels run.

A new family adds an entry to `MODELS`. Many processes compile the kernels before the first test (`compile_ahead`).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_cases import Inputs, Log, Op, Pool, Row, assert_bitwise, int32, plan_arrays, random, row_starts
from kernel_ops import RULERS
from mambacache.kernels import FOLD, StateIndices, device, gated_rms_norm, reference
from op_conv1d import Conv1dOp
from op_gated_delta_rule import DeltaRuleOp
from op_kda import KDAOp
from op_selective_scan import SelectiveScanOp
from op_ssd import SsdOp

Make = Callable[[], Op]
Dtypes = tuple[torch.dtype, torch.dtype]  # activations, states
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SAMPLES = 1021  # different tokens in a batch
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels run in Triton's interpreter


def delta_rule(key_heads: int, value_heads: int, key_width: int, value_width: int, beta: float, divisor: int) -> Make:
    return partial(DeltaRuleOp, key_heads // divisor, value_heads // divisor, key_width, value_width, beta_scale=beta)


def conv(dim: int, width: int, activation: str | None, divisor: int, gated: bool = False) -> Make:
    return partial(Conv1dOp, dim // divisor, width, False, activation, gated)


def kda(heads: int, width: int, divisor: int) -> Make:
    return partial(KDAOp, heads // divisor, width, width)


def scan(dim: int, divisor: int) -> Make:
    return partial(SelectiveScanOp, dim // divisor)


def ssd(groups: int, heads: int, width: int, state_width: int, divisor: int) -> Make:
    return partial(SsdOp, max(groups // divisor, 1), heads // divisor, width, state_width)


MODELS: dict[str, dict[str, Callable[[int], Make]]] = {
    "gated_delta_rule": {
        "qwen3-next": partial(delta_rule, 16, 32, 128, 128, 1.0),  # Qwen3.5-35B, 9B and 4B too
        "qwen3.5-27b": partial(delta_rule, 16, 48, 128, 128, 1.0),
        "qwen3.5-122b": partial(delta_rule, 16, 64, 128, 128, 1.0),
        "olmo-hybrid": partial(delta_rule, 30, 30, 96, 192, 2.0),
    },
    "kda": {"kimi-linear": partial(kda, 32, 128)},
    "conv1d": {
        "qwen3-next": partial(conv, 8192, 4, "silu"),
        "qwen3.5-27b": partial(conv, 10240, 4, "silu"),
        "qwen3.5-122b": partial(conv, 12288, 4, "silu"),
        "olmo-hybrid": partial(conv, 11520, 4, "silu"),
        "lfm2": partial(conv, 2048, 3, None, gated=True),
    },
    "selective_scan": {
        "falcon-mamba": partial(scan, 8192),  # Jamba too
        "mamba-2.8b": partial(scan, 5120),
    },
    "ssd": {
        "nemotron-h-8b": partial(ssd, 8, 128, 64, 128),
        "nemotron-3-nano": partial(ssd, 8, 64, 64, 128),
        "granite-4-small": partial(ssd, 1, 128, 64, 128),  # Bamba too
        "falcon-h1-7b": partial(ssd, 1, 24, 128, 256),
        "zamba2-7b": partial(ssd, 2, 112, 64, 64),
    },
}
"""This maps each op to layers of real models, by the number of GPUs that share their heads."""

DIVISORS = (1, 2, 4, 8)
INDIVISIBLE = {("olmo-hybrid", 4), ("olmo-hybrid", 8)}  # 30 heads
SHARED_BY = {model: DIVISORS[max(3 - i, 1)] for models in MODELS.values() for i, model in enumerate(models)}
"""This is the number of GPUs that share a model in tests that do not try all numbers: each number compiles kernels."""

DTYPES: dict[str, tuple[Dtypes, ...]] = {
    "gated_delta_rule": ((BF16, FP32), (BF16, BF16), (BF16, FP16), (FP16, FP32), (FP16, FP16), (FP32, FP32)),
    "kda": ((BF16, FP32), (BF16, BF16), (BF16, FP16), (FP16, FP32), (FP16, FP16), (FP32, FP32)),
    "conv1d": ((BF16, BF16), (FP16, FP16), (FP32, FP32)),
    "ssd": ((BF16, FP32), (BF16, BF16), (BF16, FP16), (FP16, FP32), (FP16, FP16), (FP32, FP32)),
    "selective_scan": ((BF16, FP32), (BF16, BF16), (BF16, FP16), (FP16, FP32), (FP16, FP16), (FP32, FP32)),
}
"""This lists the dtypes of each op. Models use the first pair."""


NORM_OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3-next": {},
    "kimi-linear": {"activation": "sigmoid", "round_normed": False},
    "mamba2": {"norm_before_gate": False},
    "falcon-h1": {"norm_before_gate": False, "round_normed": False},
}


@dataclass(frozen=True)
class Mix:
    """Hold the number of tokens of each decode row and each prefill row of a batch."""

    decodes: tuple[int, ...] = ()
    prefills: tuple[int, ...] = ()


MIXES = {
    "one token": Mix(prefills=(1,)),
    "1 to 3 tokens": Mix(prefills=(1, 2, 3) * 6),
    "varlen": Mix(prefills=(64, 1, 65, 3, 200, 2, 511, 63, 130)),
    "64 x 128": Mix(prefills=(128,) * 64),
    "1 x 8192": Mix(prefills=(8192,)),
    "1 x 33000": Mix(prefills=(33000,)),
    "batch 1": Mix(decodes=(1,)),
    "batch 512": Mix(decodes=(1,) * 512),
    "batch 48, 4 tokens": Mix(decodes=(4, 1, 3) * 16),
    "batch 3, 8 tokens": Mix(decodes=(8, 8, 5)),
    "mixed": Mix(decodes=(1,) * 100, prefills=(1000, 77, 2048, 5)),
    "mixed, drafts": Mix(decodes=(2, 4, 1) * 5, prefills=(3, 300, 64)),
}


@dataclass(frozen=True)
class Case:
    op: str
    model: str
    divisor: int
    mix: str
    dtypes: Dtypes

    def __str__(self) -> str:
        names = (str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        return "-".join([self.op, self.model, str(self.divisor), self.mix, *names])

    @property
    def make(self) -> Make:
        return MODELS[self.op][self.model](self.divisor)


def every_case(op: str) -> list[Case]:
    """Return each model on each number of GPUs with each mix in the usual dtypes.

    The first model comes in the other dtypes too.
    """
    models, (usual, *others) = MODELS[op], DTYPES[op]
    whole = [
        Case(op, model, divisor, mix, usual)
        for model, divisor, mix in product(models, DIVISORS, MIXES)
        if (model, divisor) not in INDIVISIBLE
    ]
    first = next(iter(models))
    return whole + [Case(op, first, 8, mix, dtypes) for mix, dtypes in product(MIXES, others)]


def pairwise_cases(cases: Sequence[Case]) -> list[Case]:
    """Return a few of the cases, with every pair of values that any case has."""

    def pairs(case: Case) -> set[tuple[object, object]]:
        return set(combinations(enumerate((case.model, case.divisor, case.mix, case.dtypes)), 2))

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def move_parameters(op: Op) -> None:
    """Move the tensors that an op keeps beside its inputs to the device, in fp32."""
    for holder in (vars(op), getattr(op, "parameters", {})):
        holder |= {name: x.to(DEVICE, FP32) for name, x in holder.items() if isinstance(x, Tensor)}


class Batch:
    """Make rows of a mix in a shuffled pool and a token log full of NaN, with inputs that are views of one wide tensor.

    Rows resume from the null block, from shared blocks or, in decode, from a block that they overwrite. The log of a
    decode row begins and ends anywhere. Rows that fill their log have a dst, as do some other rows. Prefill rows begin
    anywhere, and some store checkpoints. The last `padding` tokens of the flat batch belong to no row.
    """

    def __init__(self, op: Op, mix: Mix, dtypes: Dtypes, seed: int = 0, padding: int = 3) -> None:
        self.op, self.rng = op, np.random.default_rng(seed)
        move_parameters(op)
        blocks = 16 + len(mix.decodes) + sum(2 + n // 256 for n in mix.prefills)
        self.pool = Pool(op.state_shape, dtypes[1], blocks=blocks, seed=seed, device=DEVICE)
        self.values = [random(*op.state_shape, seed=90 + i).to(DEVICE) for i in range(3)]
        self.shared = [0, *(self.pool.take(value) for value in self.values)]
        self.log = Log(op, self.pool, dtypes[0], 1 + len(mix.decodes))
        logged = {name: x.to(DEVICE) for name, x in op.inputs(FOLD, dtypes[0], seed).items()}
        self.entries = op.entries(logged, self.values[0])
        self.states = op.walk(logged, self.values[0])[1] if op.carries_state else []
        self.decodes = [self._decode(length) for length in mix.decodes]
        self.prefills = [self._prefill(length) for length in mix.prefills]
        arrays = plan_arrays(self.decodes, self.prefills)
        self.tokens = int(arrays["query_start_loc"][-1]) + padding
        arrays["tokens"] = int32([0] * self.tokens)
        self.indices = StateIndices.from_arrays(arrays, DEVICE)
        self.is_decode, self.is_prefill = (torch.zeros(self.tokens, dtype=torch.bool, device=DEVICE) for _ in range(2))
        starts = row_starts(self.decodes, self.prefills)
        for mask, rows in ((self.is_decode, self.decodes), (self.is_prefill, self.prefills)):
            for row in rows:
                start = starts.pop(0)
                mask[start : start + row.length] = True
        self.inputs = self._views(op.inputs(SAMPLES, dtypes[0], seed))

    def _source(self) -> int:
        return int(self.rng.choice(self.shared))

    def _decode(self, length: int) -> Row:
        end = int(self.rng.integers(FOLD - length + 1))
        start = int(self.rng.integers(end + 1))
        src, dst = self._source(), 0
        if end + length == FOLD or self.rng.random() < 0.3:
            dst = self.pool.take(self.values[0])
            src = dst if self.rng.random() < 0.3 else src
        drafts = int(self.rng.integers(8))
        slot = self.log.take([each[: end - start] for each in self.entries], start, self.states, drafts)
        return Row(length, src, dst, log_slot=slot, log_start=start, log_end=end)

    def _prefill(self, length: int) -> Row:
        context = int(self.rng.choice([0, 64, 4096, int(self.rng.integers(1, 200))]))
        boundaries = range((context // 64 + 1) * 64, context + length, 64)
        checkpoints = {b: self.pool.take() for b in boundaries if self.rng.random() < 0.1}
        return Row(length, self._source() if context else 0, self.pool.take(), context, checkpoints=checkpoints)

    def _views(self, samples: Inputs) -> Inputs:
        """Return every token's inputs, taken from the samples in turn, with NaN in padding tokens.

        In bf16 each input begins at a multiple of 16 bytes: kernels in Gluon need that, and take no other dtype.
        """
        drawn = torch.arange(self.tokens, device=DEVICE) % SAMPLES
        filled = (self.is_decode | self.is_prefill)[:, None]
        parts = [torch.where(filled, sample.flatten(1).to(DEVICE)[drawn], torch.nan) for sample in samples.values()]
        gaps = [-part.shape[1] % 8 if part.dtype == BF16 else 0 for part in parts]
        parts = [pad(part, (0, gap), value=torch.nan) for part, gap in zip(parts, gaps, strict=True)]
        views = torch.cat(parts, dim=1).split([part.shape[1] for part in parts], dim=1)
        views = [view[:, : view.shape[1] - gap] for view, gap in zip(views, gaps, strict=True)]
        return {name: view.unflatten(1, x.shape[1:]) for (name, x), view in zip(samples.items(), views, strict=True)}

    def run(self, state: Tensor | None = None, log: Sequence[Tensor] | None = None) -> Tensor:
        state, log = self.pool.state if state is None else state, self.log.tensors if log is None else log
        return self.op.run(self.inputs, state, log, self.indices)

    @property
    def decode_blocks(self) -> list[int]:
        return [row.target for row in self.decodes if row.target]

    @property
    def prefill_blocks(self) -> list[int]:
        return [block for row in self.prefills for block in row.stored.values()]


def relative_error(actual: Tensor, exact: Tensor, least: float = 0.0) -> float:
    """Return the RMS error relative to the exact values' RMS. Their mean square counts as at least `least`."""
    return float(((actual.double() - exact).square().mean() / exact.square().mean().clamp(min=least)).sqrt())


def errors_and_ruler(batch: Batch) -> dict[str, tuple[float, float]]:
    """Return RMS errors against float64 of outputs, stored states and logs: the kernels' and the reference's.

    The reference rounds. Run the kernels on the batch's pool. Check that they write nothing else, and zeros to padding
    tokens. A state that is a copy of inputs must equal the reference's in every bit.
    """
    op, pool, log, indices = batch.op, batch.pool, batch.log, batch.indices
    dtype = next(iter(batch.inputs.values())).dtype
    inputs = {name: torch.where(x.isnan(), 0, x) for name, x in batch.inputs.items()}
    before, logs_before = pool.slab.clone(), log.slabs()
    exact_state, ruler_state = pool.state.double(), pool.view(before.clone())
    exact_log, ruler_log = (
        [x.double() if x.is_floating_point() else x.clone() for x in log.tensors],
        log.views(log.slabs()),
    )
    doubles = {name: x.double() for name, x in inputs.items()}
    exact = op.run(doubles, exact_state, exact_log, indices, library=reference)
    rounding = {"operand_dtype": dtype} if op.name in RULERS and dtype.itemsize == 2 else {}
    ruler = op.run(inputs, ruler_state, ruler_log, indices, library=reference, **rounding)
    y = batch.run()
    assert not y[~(batch.is_decode | batch.is_prefill)].any(), "padding is not zero"
    pool.assert_only_written(before, batch.decode_blocks + batch.prefill_blocks)
    log.assert_only_written(logs_before, batch.decodes)
    if op.exact_state:
        assert_bitwise(pool.state, ruler_state)
    result = {}
    for kind, tokens, blocks in (
        ("decode", batch.is_decode, batch.decode_blocks),
        ("prefill", batch.is_prefill, batch.prefill_blocks),
    ):
        pairs = {"outputs": (tokens, y, ruler, exact)} if tokens.any() else {}
        if blocks and not op.exact_state:
            pairs["states"] = blocks, pool.state, ruler_state, exact_state
        for what, (chosen, actual, rounded, wanted) in pairs.items():
            errors = (relative_error(x[chosen], wanted[chosen]) for x in (actual, rounded))
            result[f"{kind} {what}"] = tuple(errors)
    written = [(row.log_slot, row.log_end + i) for row in batch.decodes for i in range(row.length)]
    slots = [row.log_slot for row in batch.decodes if row.length]
    for i, logs in enumerate(zip(log.tensors, ruler_log, exact_log, strict=True) if written else ()):
        places = tuple(zip(*written, strict=True)) if i < len(log.of_entries) else slots
        actual, rounded, wanted = (each[places].double() for each in logs)
        result[f"log {i}"] = relative_error(actual, wanted, 1), relative_error(rounded, wanted, 1)
    return result


def norm_errors(
    tokens: int, heads: int, dim: int, dtype: torch.dtype, weight_dtype: torch.dtype, **options: Any
) -> tuple[float, float]:
    """Return the kernel's and the reference's RMS error of the gated norm against float64, where the gate is a view."""
    wide = random(tokens, 2 * heads * dim, seed=1, dtype=dtype).to(DEVICE)
    x, gate = (part.unflatten(1, (heads, dim)) for part in wide.split(heads * dim, dim=1))
    weight = (1 + 0.3 * random(dim, seed=2)).to(DEVICE, weight_dtype)
    exact = gated_rms_norm(x.double(), gate.double(), weight.double(), 1e-5, **options)
    actual = gated_rms_norm(x, gate, weight, 1e-5, **options)
    assert actual.dtype == dtype and actual.shape == x.shape
    ruler = reference.gated_rms_norm(x, gate, weight, 1e-5, **options)
    return relative_error(actual, exact), relative_error(ruler, exact)


COMPILED_MIXES = (
    Mix((2, 1), (70, 3)),
    Mix((1, 1)),
    Mix((), (1,) * 300),
    Mix((), (300,) * 20),
    Mix((), (2000, *(1,) * 40)),
)
"""These mixes compile every variant of a kernel: with and without rows of each kind, few and many, short and long. In
some mixes the rows leave most processors little to do."""


SLOWEST_FIRST = ("selective_scan", "ssd", "kda", "gated_delta_rule", "conv1d")  # by the time to compile
PROCESS_BYTES = 6 << 30  # memory of a process that compiles, with its batch, and of a test


def run_once(make: Make, dtypes: Dtypes, dense: bool = False) -> None:
    """Run an op on inputs that are views of one wide tensor or, if `dense`, tensors of their own."""
    for mix in COMPILED_MIXES:
        batch = Batch(make(), mix, dtypes)
        if dense:
            batch.inputs = {name: x.clone(memory_format=torch.contiguous_format) for name, x in batch.inputs.items()}
        batch.run()
        del batch
        torch.cuda.empty_cache()  # all processes and tests share one GPU, which may have 80 GB only


@contextmanager
def served_as(gpu: str) -> Iterator[None]:
    """Choose kernels as on another GPU, sm80 for instance, or as on the GPU that is present, named ""."""
    cached = device.capability_of, device.shared_memory, device.check_gpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAMBACACHE_GPU", gpu)
        for launcher in launchers():
            patch.setattr(launcher, "variants", {})
        for function in cached:
            function.cache_clear()
        yield
    for function in cached:
        function.cache_clear()


def launchers() -> list[Any]:
    from mambacache.kernels.gpu.common.launch import Launcher

    modules = [module for name, module in sys.modules.items() if name.startswith("mambacache.kernels.gpu.")]
    return [x for module in modules for x in vars(module).values() if isinstance(x, Launcher)]


def compile_once(make: Make, dtypes: Dtypes, dense: bool, gpu: str) -> None:
    with served_as(gpu):
        run_once(make, dtypes, dense)


def variant(make: Make, dtypes: Dtypes, dense: bool, gpu: str) -> str:
    """Return a text that tells which kernels an op runs: its shapes and options, not its values."""
    op = make()
    parts = op.inputs(1, dtypes[0]) | vars(op) | getattr(op, "parameters", {})
    parts = {name: part.shape if isinstance(part, Tensor) else part for name, part in parts.items()}
    plain = {name: part for name, part in parts.items() if name != "parameters" and not callable(part)}
    return repr((op.name, plain, dtypes, dense, gpu))


def compile_ahead(kernels: Iterable[tuple[Make, Dtypes, bool, str]]) -> None:
    """Fill Triton's cache with the kernels of these ops, in as many processes as cores and GPU memory allow.

    Each process runs tiny batches, so it compiles the kernels that serving compiles. The slowest ops come first, so
    that all processes end at about the same time.
    """
    processes = min(os.cpu_count() or 1, torch.cuda.mem_get_info()[1] // PROCESS_BYTES)
    different = {variant(*kernel): kernel for kernel in kernels}
    jobs = sorted(different.values(), key=lambda kernel: SLOWEST_FIRST.index(kernel[0]().name))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(processes, 1), mp_context=spawn) as workers:
        for job in [workers.submit(compile_once, *kernel) for kernel in jobs]:
            job.result()


def kernels_of(parameters: Mapping[str, Any]) -> Iterator[tuple[Make, Dtypes, bool, str]]:
    """Yield the ops that a test with these parameters runs, whether their inputs are dense, and the GPU."""
    gpu = parameters.get("gpu", "")
    if "case" in parameters:
        yield parameters["case"].make, parameters["case"].dtypes, False, gpu
    elif "make" in parameters and "dtypes" in parameters:
        yield parameters["make"], parameters["dtypes"], False, gpu
    elif "make" in parameters:
        yield parameters["make"], (parameters["dtype"], parameters["state_dtype"]), True, gpu
    elif "op" in parameters:
        first = next(iter(MODELS[parameters["op"]].values()))
        yield from ((first(divisor), DTYPES[parameters["op"]][0], False, gpu) for divisor in DIVISORS)
