"""Kernels compile side by side for a GPU that is absent: the stand-in for Triton's driver knows its kind alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class Hopper:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


driver.set_active(Hopper())
from mambacache.kernels import api, compiling, gpu
from mambacache.kernels.compilation import Zeros

compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **rest: compiled.append(fn.name.split(".")[-1])
api.backend = lambda x: Zeros(gpu)


def norm(dtype):
    x = torch.full((5, 64), torch.nan, dtype=dtype)
    return api.rms_norm(x, torch.ones(64), 1e-6, round_normed=True)


for _ in range(2):
    with ThreadPoolExecutor(2) as threads, compiling(threads):
        found = [norm(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert not any(x.any() for x in found), "a result is not zero"
    print(compiled)
"""


def test_kernels_compile_once_and_none_is_launched(tmp_path: Path) -> None:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", SCRIPT]
    done = subprocess.run(
        command, env=settings | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(["_rms_norm_kernel"] * 3)] * 2
