"""Check what a GPU's compute capability decides."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from mambacache.kernels import device
from mambacache.kernels.gpu.common import launch
from mambacache.kernels.gpu.common.hopper import served

INTERPRETER = -1


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget GPUs, before a test and after it."""
    cached = device.capability_of, device.shared_memory, device.check_gpu
    monkeypatch.delenv("MAMBACACHE_GPU", raising=False)
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@pytest.fixture(params=[(8, 0), (8, 7), (9, 0), (9, 4), (10, 0), (11, 0), (12, 1), (13, 0)], ids=str)
def capability(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[int, int]:
    """Pretend to have a GPU whose blocks may have 12,345 bytes of shared memory."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA GPU")
    properties = SimpleNamespace(shared_memory_per_block_optin=12_345)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found: tuple[int, int] = request.param
    return found


def test_the_interpreter_runs_as_a_hopper_does() -> None:
    assert device.is_hopper(INTERPRETER) and device.overlaps_launches(INTERPRETER)
    assert device.shared_memory(INTERPRETER) == 227 * 1024


def test_a_gpu_is_served_by_its_capability(capability: tuple[int, int]) -> None:
    assert device.is_hopper(0) == (capability[0] == 9)
    assert device.overlaps_launches(0) == (capability[0] >= 9)
    known = {(8, 0): 163, (9, 0): 227, (10, 0): 227, (12, 1): 99}.get(capability)
    assert device.shared_memory(0) == (known * 1024 if known else 12_345)


def test_a_gpu_for_which_nothing_was_compiled_is_warned_of_once(capability: tuple[int, int]) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        device.check_gpu(0)
        device.check_gpu(0)
    untested = "The kernels were not tested for compute capability {}.{}, which cuda:0 (NVIDIA GPU) has."
    expected = [] if capability in device.GPUS else [untested.format(*capability)]
    assert [str(warning.message) for warning in said] == expected


@pytest.mark.parametrize(
    ("name", "hopper", "overlaps", "kib"),
    [
        ("sm80", False, False, 163),
        ("sm86", False, False, 99),
        ("sm89", False, False, 99),
        ("sm90", True, True, 227),
        ("sm100", False, True, 227),
        ("sm120", False, True, 99),
    ],
)
def test_a_name_chooses_the_kernels(
    monkeypatch: pytest.MonkeyPatch, name: str, hopper: bool, overlaps: bool, kib: int
) -> None:
    monkeypatch.setenv("MAMBACACHE_GPU", name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: pytest.fail("the GPU was asked"))
    for index in (INTERPRETER, 0):
        assert (device.is_hopper(index), device.overlaps_launches(index)) == (hopper, overlaps)
        assert device.shared_memory(index) == kib * 1024
    assert served([torch.zeros(64, 8, dtype=torch.bfloat16)], [(8, 1)]) == hopper


@pytest.mark.parametrize("name", ["80", "sm75", "sm_90", "hopper"])
def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MAMBACACHE_GPU", name)
    with pytest.raises(ValueError, match=rf"^MAMBACACHE_GPU is '{name}': set it to one of sm80, .*, sm121,"):
        device.is_hopper(INTERPRETER)


class Kernel:
    """Stand in for a kernel, and keep the options of its launches."""

    arg_names: ClassVar = ["x"]

    def __init__(self) -> None:
        self.options: list[dict[str, object]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> object:
        return lambda *arguments, **options: self.options.append(options)


@pytest.mark.parametrize("name", ["sm80", "sm90", "sm120"])
def test_all_gpus_but_hopper_get_code_for_ampere(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("MAMBACACHE_GPU", name)
    kernel = Kernel()
    launch.Launcher(kernel)(1, [torch.zeros(4)], launch.NO_POINTERS, [], {}, num_warps=2)
    arch = {} if name == "sm90" else {"arch": "sm80"}
    assert kernel.options == [{"num_warps": 2, "enable_fp_fusion": True, **arch}]


def test_a_kernel_may_forbid_fused_products() -> None:
    kernel = Kernel()
    launch.Launcher(kernel)(1, [torch.zeros(4)], launch.NO_POINTERS, [], {}, enable_fp_fusion=False)
    assert kernel.options == [{"enable_fp_fusion": False}]
