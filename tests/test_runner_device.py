"""Check which devices the ops and the engine take, as far as a machine without a GPU can tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mambacache import LLM
from mambacache.kernels import backend, device, reference
from mambacache.runner.sizing import present_device


class FakeGpuTensor:
    """Have as much of a GPU tensor as decides which backend serves it."""

    is_cuda = True

    def __init__(self, index: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.index, self.dtype = index, dtype

    def get_device(self) -> int:
        return self.index


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend to have two H200 and a T4; the first H200 is the current device."""
    names = {"is_available": lambda: True, "device_count": lambda: 3, "current_device": lambda: 0}
    names["get_device_capability"] = lambda index: (7, 5) if index == 2 else (9, 0)
    names["get_device_name"] = lambda index: "NVIDIA T4" if index == 2 else "NVIDIA H200"
    for name, function in names.items():
        monkeypatch.setattr(torch.cuda, name, function)
    device.check_gpu.cache_clear()
    device.capability_of.cache_clear()
    yield
    device.check_gpu.cache_clear()
    device.capability_of.cache_clear()


TOO_OLD = "^cuda:2 is an NVIDIA T4 of compute capability 7.5, and the kernels .* compute capability 8.0 and later: "


def test_ops_refuse_a_gpu_that_is_too_old(gpus: None) -> None:
    with pytest.raises(ValueError, match=TOO_OLD):
        backend.backend(FakeGpuTensor(2))
    assert backend.backend(FakeGpuTensor(2, torch.float64)) is reference  # plain torch


@pytest.mark.parametrize("capability", [(9, 0), (9, 4), (9, 5)])  # as ROCm's torch tells an MI250, MI300 and MI355
def test_ops_refuse_a_gpu_of_rocm(capability: tuple[int, int], gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "AMD Instinct")
    with pytest.raises(ValueError, match=r"^cuda:0 is an AMD Instinct of ROCm, and the kernels are made for NVIDIA"):
        backend.backend(FakeGpuTensor(0))


def test_ops_refuse_a_gpu_that_is_not_current(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"on cuda:1, but the current device is cuda:0: .* under torch.cuda.device\(1\)"
    ):
        backend.backend(FakeGpuTensor(1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert backend.backend(FakeGpuTensor(1)).__name__ == "mambacache.kernels.gpu"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:2", TOO_OLD),
        ("cuda:3", "device is 'cuda:3', but the last of the 3 CUDA devices here is cuda:2"),
        ("cuda:one", "device is 'cuda:one': set it to auto, cpu or cuda, or to one of several such as cuda:1"),
    ],
)
def test_the_engine_refuses_devices_at_its_start(gpus: None, text_model: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(text_model, device=name)


def test_devices_that_serve(gpus: None) -> None:
    assert [present_device(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
