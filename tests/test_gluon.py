"""Kernels in Gluon, which the interpreter does not run: that the installed Triton compiles them for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource

from mambacache.kernels.gpu.gated_delta_rule.prefill_hopper_fused import fused
from mambacache.kernels.gpu.gated_delta_rule.prefill_hopper_prepare import prepare
from mambacache.kernels.gpu.gated_delta_rule.prefill_hopper_scan import scan
from mambacache.kernels.gpu.kda.prefill_hopper_prepare import prepare as kda_prepare
from mambacache.kernels.gpu.kda.prefill_hopper_scan import scan as kda_scan
from mambacache.kernels.gpu.ssd.prefill_hopper import scan as ssd_scan

width, rows = map(int, sys.argv[1:])
strides = {"Q_STRIDES": (640, width, 1), "K_STRIDES": (640, width, 1)}
gates = {"A_STRIDES": (640, 1), "B_STRIDES": (640, 1)}
shape = {"HEADS": 1, "VALUE_HEADS": 2, "K": width, "BLOCK_K": 1 << (width - 1).bit_length()}
outputs = {"V_STRIDES": (640, rows, 1), "OUT_STRIDE": 2 * rows, "V": rows, "BLOCK_V": rows}
kda_inputs = {"STRIDES": ((640, width, 1),) * 3, "B_STRIDES": (640, 1)}
stages = [{"CONCURRENT": 132, "STAGES": stages} for stages in (2, 3)]
kda_shape = {"HEADS": 2, "K": width, "BLOCK_K": shape["BLOCK_K"]}
of_tokens = {name + "_STRIDES": (640, width, 1) for name in "XBCZ"}
ssd_shape = {"HEADS": 2, "GROUPS": 1, "P": rows, "N": width, "BLOCK_N": shape["BLOCK_K"], "STAGES": 2}
BF16 = "q", "k", "v", "g", "a", "b", "tiles", "operands", "out", "x", "dt", "B", "C", "z"
FP32 = "A_log", "dt_bias", "vectors", "totals", "state", "A", "D"
NUMBERS = {"slot_stride": "i32", "dt_stride": "i32", "dt_head_stride": "i32", "dt_min": "fp32", "dt_max": "fp32"}
for kernel, constants, warps in (
    (fused.kernel, strides | gates | shape | outputs, 8),
    *((prepare.kernel, strides | gates | shape | {"BACKWARDS": backwards}, 4) for backwards in (False, True)),
    (scan.kernel, strides | shape | outputs | {"CONCURRENT": 132}, rows // 16),
    (kda_prepare.kernel, kda_inputs | kda_shape, 4),
    *((kda_scan.kernel, kda_shape | outputs | kda_stages, rows // 16) for kda_stages in stages),
    (ssd_scan.kernel, of_tokens | {"OUT_STRIDE": 2 * rows} | ssd_shape | {"CONCURRENT": 132}, 4),
):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        number = "i32" if name.startswith("num_") else NUMBERS.get(name, "*i32")
        dtype = "*bf16" if name in BF16 else "*fp32" if name in FP32 else number
        signature[name] = "constexpr" if name in constants else dtype
        if signature[name].startswith("*"):
            aligned[i,] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    loops = [line for line in compiled.asm["ttgir"].splitlines() if "scf.for" in line and "older_place" in line]
    print(compiled.name, compiled.metadata.shared, "wgmma" in compiled.asm["ptx"], len(loops))
"""


@pytest.mark.full
@pytest.mark.parametrize(("width", "rows"), [(128, 128), (96, 64), (16, 64)])
def test_kernels_compile_for_hopper(width: int, rows: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", COMPILE, str(width), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("_")]
    kernels = ["_delta_prefill_kernel", "_delta_prepare_kernel", "_delta_prepare_kernel", "_delta_scan_kernel"]
    kernels += ["_kda_prepare_kernel", "_kda_scan_kernel", "_kda_scan_kernel", "_ssd_scan_kernel"]
    assert [name for name, *_ in found] == kernels
    for name, shared, multiplies, loops in found:
        assert int(shared) <= 227 * 1024 and multiplies == "True"
        # Both loops must carry the places of outputs: beginning with other values they were taken for unchanged.
        assert int(loops) == (2 if name == "_delta_prefill_kernel" else 0)
