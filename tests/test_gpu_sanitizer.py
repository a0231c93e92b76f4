"""Run a small batch of every op under compute-sanitizer. Kernels are a Hopper's, and then other GPUs'."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_cases import MODELS
from mambacache import kernels
from test_gpu_portable import ON_EACH

RECURRENT = """
from gpu_cases import DTYPES, MODELS, run_once
model = next(iter(MODELS[{op!r}].values()))
run_once(model(8), DTYPES[{op!r}][0])
"""
# Rows have several chunks, tiles are not full, and there are more tiles than programs.
PREFILL_IN_TURNS = """
from importlib import import_module
from gpu_cases import BF16, Batch, Mix, delta_rule
from mambacache.kernels.gpu.common.chunks import keep_busy
from mambacache.kernels.gpu.kda.prefill_hopper_persistent import MIN_TURNS
from op_kda import KDAOp
for widths in ((128, 192), (48, 80)):
    for op in (delta_rule(2, 4, *widths, 1.0, 1)(), KDAOp(4, *widths)):
        batch = Batch(op, Mix(prefills=(1, 65, 130, 200)), (BF16, BF16))
        import_module("mambacache.kernels.gpu." + op.name + ".prefill").processors = lambda index: 2
        turns = 4 * -(-widths[1] // 128)
        assert keep_busy(batch.indices, turns, 2) and 4 * turns >= 2 * MIN_TURNS
        batch.run()
"""
PLAIN_NORM = """
import torch
from test_kernels_rms_norm import check_against_the_reference, norm_input, norm_weight
for width in (160, 35000):
    x = norm_input("split", 7, width, torch.bfloat16, "cuda")
    check_against_the_reference(x, norm_weight(width, torch.bfloat16, "cuda"), True)
"""
EXPERTS = """
import torch
from test_gpu_experts import check_grouping
from test_kernels_experts import check_combine, check_silu_and_mul
for tokens in (7, 600):
    check_grouping(tokens, 8, 60)
check_silu_and_mul(63, 24, 3, torch.bfloat16, "cuda")
check_combine((65, 8), 100, 3, (torch.bfloat16, torch.bfloat16), "cuda")
"""
NORM = """
import torch
from gpu_cases import norm_errors
norm_errors(7, 4, 128, torch.bfloat16, torch.bfloat16)
"""
ATTENTION = """
from test_gpu_paged_attention import SHAPES, batch_of
batch_of(SHAPES["grouped"], contexts=(0, 65, 1000)).run()
"""
CODE = {op: RECURRENT.format(op=op) for op in MODELS} | {
    "prefill in turns": PREFILL_IN_TURNS,
    "experts": EXPERTS,
    "gated_rms_norm": NORM,
    "rms_norm": PLAIN_NORM,
    "paged_attention": ATTENTION,
}


# Triton tells a warp its role by a byte. A barrier of all warps stands between its write and its read. racecheck still
# reports a race, with both accesses at the kernel's first line.
HAZARD = re.compile(
    r"Race reported between Read access at (\w+)\+\w+ in (\S+)\n=+ +and Write access at (\w+)\+\w+ in (\S+) \["
)
START_OF_ROLES = {"_delta_prefill_kernel": "gated_delta_rule/prefill_hopper_fused.py"}


def first_line(kernel: str) -> str:
    """Return the kernel's first line as racecheck names it."""
    path = Path(kernels.__file__).parent / "gpu" / START_OF_ROLES[kernel]
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if text.startswith(f"def {kernel}("))
    return f"{path.name}:{line}"


def found_nothing(report: str) -> bool:
    """Return whether a tool's report has no error but hazards at the start of roles."""
    starts = [
        reader == writer and reader in START_OF_ROLES and first_line(reader) == reading == writing
        for reader, reading, writer, writing in HAZARD.findall(report)
    ]
    return all(starts) and (f"SUMMARY: {len(starts)} " in report)


REPORT = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at {kernel}+0x1c0 in {reading}
=========     and Write access at {kernel}+0x8bb0 in {writing} [196 hazards]
=========
========= RACECHECK SUMMARY: {hazards} hazard displayed ({hazards} error, 0 warnings)
"""


def test_no_hazard_but_the_start_of_roles_passes() -> None:
    line = first_line("_delta_prefill_kernel")
    elsewhere = line.replace(":", ":1")
    own = {"kernel": "_delta_prefill_kernel", "reading": line, "writing": line, "hazards": 1}
    assert found_nothing(REPORT.format(**own))
    assert not found_nothing(REPORT.format(**own | {"hazards": 2}))
    assert not found_nothing(REPORT.format(**own | {"writing": elsewhere}))
    assert not found_nothing(REPORT.format(**own | {"reading": elsewhere}))
    assert not found_nothing(REPORT.format(**own | {"kernel": "_delta_scan_kernel"}))
    assert not found_nothing(REPORT.format(**own).replace("Read access", "Write access"))
    assert found_nothing("========= ERROR SUMMARY: 0 errors\n")
    assert not found_nothing("========= ERROR SUMMARY: 1 error\n")
    assert not found_nothing("Traceback (most recent call last):\n")


@pytest.mark.gpu_full
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize(("gpu", "name"), [*(("", name) for name in CODE), *ON_EACH, ("sm80", "paged_attention")])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing(gpu: str, name: str, tool: str) -> None:
    """Turn torch's cache of memory off, so that every tensor ends where its memory ends."""
    searched = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": searched, "MAMBACACHE_GPU": gpu}
    command = ["compute-sanitizer", "--tool", tool, sys.executable, "-c", CODE[name]]
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and found_nothing(done.stdout), done.stdout[-4000:]
