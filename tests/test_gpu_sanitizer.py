"""One small batch of every op under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_cases import MODELS

RECURRENT = """
from gpu_cases import DTYPES, MODELS, run_once
model = next(iter(MODELS[{op!r}].values()))
run_once(model(8), DTYPES[{op!r}][0])
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
    "experts": EXPERTS,
    "gated_rms_norm": NORM,
    "rms_norm": PLAIN_NORM,
    "paged_attention": ATTENTION,
}


@pytest.mark.gpu_full
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing(name: str, tool: str) -> None:
    """Without torch's cache of memory, so that every tensor ends where its memory does."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", CODE[name]]
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and "SUMMARY: 0 " in done.stdout, done.stdout[-4000:]
