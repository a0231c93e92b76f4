"""Compile the kernels that the dispatchers launch for real models, for a GPU that is absent. None is launched.

`compile_for` starts this file as a child, since LLVM may abort, with the Triton and the GPU that its caller asks for. A
stand-in for Triton's driver gives that GPU's capability.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_cases import BF16, DTYPES, FP16, FP32, MODELS, NORM_OPTIONS, Dtypes, Mix, move_parameters
from kernel_cases import Log, Pool, Row, decode_width, plan_arrays
from mambacache import kernels
from mambacache.kernels import StateIndices

INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05", "griddepcontrol", "st.global")


@dataclass(frozen=True)
class Launch:
    """Hold facts of a compiled kernel: registers and spilled bytes of a thread, bytes of shared memory of a block."""

    case: str
    kernel: str
    instructions: tuple[str, ...]  # of `INSTRUCTIONS`, those in its PTX
    shared: int
    registers: int
    spilled: int
    barriers: int
    overlaps: bool  # it may begin before the previous launch ends

    def __str__(self) -> str:
        return f"{self.case}: {self.kernel}"


def compile_for(capability: int, triton: Path | None, cache: Path, chosen: str = "") -> list[Launch]:
    """Return the different launches of cases for a compute capability, 80 for instance.

    `triton` is a folder with another Triton than the installed one, `cache` an empty folder, and `chosen` a pattern at
    the beginning of the cases' names. Raises AssertionError with the end of the child's output if a kernel does not
    compile.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "MAMBACACHE_GPU": f"sm{capability}",
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DUMP_PTXAS_LOG": "1",
    }
    if triton is not None:
        environment["PYTHONPATH"] = str(triton)
    command = [sys.executable, __file__, str(capability), chosen]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stderr[-3000:]}\nThe exit status is {done.returncode}."
    return [Launch(**json.loads(line)) for line in done.stdout.splitlines()]


MIXED = Mix((2, 1), (70, 3))
MIXES = {
    "mixed": MIXED,
    "one token": Mix((1, 1)),
    "many": Mix((), (128,) * 64),
    "uneven": Mix((), (2000, *(1,) * 40)),
}
RECURRENT = {
    ("gated_delta_rule", "qwen3-next", 1): ("mixed", "one token", "many", "uneven"),
    ("gated_delta_rule", "olmo-hybrid", 1): ("mixed",),
    ("kda", "kimi-linear", 1): ("mixed", "one token", "many"),
    ("ssd", "nemotron-h-8b", 8): ("mixed", "one token"),
    ("ssd", "nemotron-h-8b", 1): ("many",),
    ("ssd", "falcon-h1-7b", 1): ("mixed",),
    ("selective_scan", "falcon-mamba", 1): ("mixed", "one token"),
    ("conv1d", "qwen3-next", 1): ("mixed",),
    ("conv1d", "lfm2", 1): ("mixed", "one token"),
}
OTHER_DTYPES = {
    ("gated_delta_rule", "qwen3-next", 1): ((FP16, FP32), (FP32, FP32)),
    ("kda", "kimi-linear", 1): ((FP16, FP32), (FP32, FP32)),
    ("ssd", "nemotron-h-8b", 8): ((FP16, FP32), (FP32, FP32)),
    ("ssd", "falcon-h1-7b", 1): ((FP32, FP32),),
}
ATTENTION = {
    "nemotron-h-8b": ((32, 8), (128, 128), BF16),
    "qwen3-next": ((16, 2), (256, 256), BF16),
    "kimi-linear": ((32, 32), (192, 128), BF16),
    "nemotron-h-8b, float32": ((32, 8), (128, 128), FP32),
    "qwen3-next, float32": ((16, 2), (256, 256), FP32),
}
PAGE = 64


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls of the ops that together take every branch of every dispatcher. Tensors are empty: none is read."""
    for (op, model, divisor), names in RECURRENT.items():
        for name in names:
            call = partial(recurrent, op, model, divisor, MIXES[name], DTYPES[op][0])
            yield f"{op} of {model} / {divisor}, {name}", call
    for (op, model, divisor), others in OTHER_DTYPES.items():
        for dtypes in others:
            name = str(dtypes[0]).removeprefix("torch.")
            yield f"{op} of {model} / {divisor}, {name}", partial(recurrent, op, model, divisor, MIXED, dtypes)
    for name, shape in ATTENTION.items():
        yield f"paged_attention of {name}", partial(attention, *shape)
    for call in (experts, moves, norms, rows_on_the_device):
        yield call.__name__, call


def views(tokens: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return parts of one wide tensor, as projections give them."""
    sizes = [prod(shape) for shape in shapes]
    parts = torch.empty(tokens, sum(sizes), dtype=dtype).split(sizes, 1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def rows_of(mix: Mix) -> tuple[list[Row], list[Row], int]:
    """Return decode rows, prefill rows, and the number of their tokens."""
    decodes = [Row(n, 1, i % 2, log_slot=i + 1, pages=(1, 2)) for i, n in enumerate(mix.decodes)]
    prefills = [Row(n, 1, 1, pages=(1, 2)) for n in mix.prefills]
    return decodes, prefills, len(decodes) * decode_width(decodes) + sum(mix.prefills)


def recurrent(name: str, model: str, divisor: int, mix: Mix, dtypes: Dtypes) -> None:
    op = MODELS[name][model](divisor)()
    move_parameters(op)
    decodes, prefills, tokens = rows_of(mix)
    shapes = {name: tuple(x.shape[1:]) for name, x in op.inputs(1, dtypes[0]).items()}
    inputs = dict(zip(shapes, views(tokens, dtypes[0], *shapes.values()), strict=True))
    pool = Pool(op.state_shape, dtypes[1], blocks=3)
    log = Log(op, pool, dtypes[0], 1 + len(decodes)).tensors
    op.run(inputs, pool.state, log, StateIndices.from_arrays(plan_arrays(decodes, prefills), "cpu"))


def attention(heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> None:
    decodes, prefills, tokens = rows_of(MIXED)
    q, k, v = views(tokens, dtype, (heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    keys, values = (torch.empty(40, PAGE, heads[1], width, dtype=dtype) for width in widths)
    arrays = plan_arrays(decodes, prefills, block_size=PAGE)
    kernels.paged_attention(q, k, v, keys, values, StateIndices.from_arrays(arrays, "cpu"))


def experts() -> None:
    hidden, choices = 2048, 10
    kernels.choose_experts(torch.empty(7, 512, dtype=BF16), choices, normalize=True)
    kernels.group_by_expert(torch.zeros(300, choices, dtype=torch.int64), 512)
    kernels.silu_and_mul(torch.empty(9, 1024, dtype=BF16))
    outputs, weights = torch.empty(7 * choices, hidden, dtype=BF16), torch.empty(7, choices, dtype=BF16)
    places = torch.zeros(7, choices, dtype=torch.int32)
    kernels.combine_experts(outputs, weights, places)
    kernels.combine_experts(outputs, weights, places, torch.empty(7, hidden, dtype=BF16), torch.empty(7, dtype=BF16))


def moves() -> None:
    layers = [kernels.conv1d_log(8192, BF16)], kernels.gated_delta_rule_log(16, 32, 128, 128, BF16, FP32)
    kernels.keep_paths(kernels.StatePool(layers, 4), torch.zeros(3, 9, dtype=torch.int32))
    source, target = torch.empty(2, 5, 2 << 20, dtype=torch.uint8)
    kernels.copy_blocks(source, target, torch.zeros(3, 2, dtype=torch.int32))


def norms() -> None:
    kernels.rms_norm(torch.empty(5, 2048, dtype=BF16), torch.empty(2048, dtype=BF16), 1e-6, round_normed=True)
    for options in NORM_OPTIONS.values():
        x, gate = views(5, BF16, (32, 128), (32, 128))
        kernels.gated_rms_norm(x, gate, torch.empty(128, dtype=BF16), 1e-6, **options)


def rows_on_the_device() -> None:
    decodes = rows_of(MIXED)[0]
    arrays = plan_arrays(decodes, [], block_size=PAGE)
    tokens = len(arrays["positions"])
    arrays |= {"late_len": arrays["decode_len"], "tokens": np.zeros(tokens, np.int32)}
    indices = StateIndices.from_arrays(arrays, "cpu")
    histories, lengths = torch.zeros(9, 1000, dtype=torch.int32), torch.ones(9, dtype=torch.int64)
    starts, first_sample, _ = kernels.draft_from_history(indices, histories, lengths)
    kernels.add_to_history(indices, first_sample, torch.zeros(tokens, dtype=torch.int64), histories, lengths)
    kernels.place_decodes(indices, starts, PAGE)


class AbsentGPU:
    """Stand in for Triton's driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    """Print each compiled kernel's `Launch` in JSON, on a line."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    driver.set_active(AbsentGPU(int(sys.argv[1])))
    from mambacache.kernels import api, gpu, ngrams, paths
    from mambacache.kernels import experts as experts_api

    for module in (api, experts_api, ngrams, paths):
        module.backend = lambda x: gpu  # type: ignore[attr-defined]
    assemble, case = CUDABackend.make_cubin, ""

    def make_cubin(self: Any, ptx: str, metadata: dict[str, Any], options: Any, *rest: Any) -> bytes:
        with redirect_stdout(StringIO()) as said:  # by ptxas
            cubin = assemble(self, ptx, metadata, options, *rest)
        registers = re.search(r"Used (\d+) registers", said.getvalue())
        spilled = re.search(r"(\d+) bytes spill stores", said.getvalue())
        assert registers and spilled, said.getvalue()
        numbers = metadata["shared"], int(registers[1]), int(spilled[1])
        found = tuple(name for name in INSTRUCTIONS if name in ptx)
        launch = Launch(case, metadata["name"], found, *numbers, ptx.count("bar.sync"), bool(options.launch_pdl))
        print(json.dumps(asdict(launch)), flush=True)
        return cubin

    CUDABackend.make_cubin = make_cubin
    for case, call in cases():
        if not re.match(sys.argv[2], case):
            continue
        print(case, file=sys.stderr)
        with ThreadPoolExecutor(1) as threads, kernels.compiling(threads):
            call()


if __name__ == "__main__":
    main()
