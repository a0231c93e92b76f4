"""Check the releases of Triton that are refused, and the private calls of Triton that `Launcher` makes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import triton
from triton.compiler import compiler
from triton.runtime.jit import JITFunction

from mambacache.kernels import device
from mambacache.kernels.gpu.common.launch import NO_POINTERS, Launcher
from mambacache.runner import sizing

CHANGE = r"install a torch for CUDA that brings Triton 3.6 to 3.9, or choose the CPU\.$"


@pytest.fixture
def unchecked() -> Iterator[None]:
    device.check_triton.cache_clear()
    yield
    device.check_triton.cache_clear()


@pytest.mark.parametrize("release", ["3.6.0", "3.9.0", "3.9.3+git0a1b2c3d"])
def test_releases_that_serve(unchecked: None, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(triton, "__version__", release)
    device.check_triton()


@pytest.mark.parametrize("release", ["2.3.1", "3.5.1", "3"])
def test_releases_that_are_refused(unchecked: None, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(triton, "__version__", release)
    with pytest.raises(ValueError, match=f"^The kernels were not tested with Triton {release}, .*: {CHANGE}"):
        device.check_triton()


@pytest.mark.parametrize("release", ["3.10.0", "4.0.0"])
def test_newer_releases_are_warned_of_once(unchecked: None, monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(triton, "__version__", release)
    with pytest.warns(match=f"^The kernels were not tested with Triton {release}, .*: {CHANGE}") as said:
        device.check_triton()
        device.check_triton()
    assert len(said) == 1


def test_triton_that_cannot_be_imported_is_refused(unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))  # it has no __version__
    with pytest.raises(ValueError, match=f"^The kernels need Triton, and .* cannot be imported .*: {CHANGE}"):
        device.check_triton()


def test_none_is_refused(unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match=f"^The kernels need Triton, and none is installed: {CHANGE}"):
        device.check_triton()


def test_the_installed_release_serves(unchecked: None) -> None:
    device.check_triton()


def test_the_engine_refuses_at_its_start(unchecked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    monkeypatch.setattr(sizing, "check_gpu", lambda index: None)
    for name, value in {"is_available": True, "device_count": 1, "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with pytest.raises(ValueError, match=r"not tested with Triton 3\.5\.1"):
        sizing.present_device("cuda")


def test_a_cpu_needs_no_triton(text_model: Path, tmp_path: Path) -> None:
    """As with torch's builds for CPUs, which bring none."""
    code = f"""
import sys
sys.modules["triton"] = None
import mambacache.kernels
from mambacache import LLM, SamplingParams
llm = LLM({str(text_model)!r}, device="cpu", kv_cache_bytes=4_000_000, checkpoint_budget_bytes=0, max_num_seqs=4)
print(len(llm.generate("one", SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].token_ids))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr


# --- the private calls ---


class Variant:
    """Stand in for a compiled kernel, in everything but the launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, *_: Any) -> None:
        pass

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return compiler.CompiledKernel.__getitem__(self, grid)


class Kernel:
    """Stand in for a kernel as `Launcher` uses it: the first launch compiles the kernel and gives the variant."""

    arg_names: ClassVar = ["x", "none", "number", "width"]

    def __init__(self) -> None:
        self.variant = Variant()

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *_, **options: self.variant


def test_a_variant_that_is_known_is_launched_with_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's `CompiledKernel` takes a grid, then all arguments of the kernel, constants too, and nothing else."""
    current = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: "stream")
    monkeypatch.setattr(compiler, "driver", SimpleNamespace(active=current))
    kernel, x = Kernel(), torch.zeros(4)
    launch = Launcher(kernel)
    for _ in range(2):
        launch(7, [x, None], NO_POINTERS, [3], {"width": 64}, num_warps=4)
    (launched,) = kernel.variant.launches  # the first call compiles, by Triton's public call
    assert launched[:5] == (7, 1, 1, "stream", "function")
    assert launched[9:] == (x.data_ptr(), None, 3, 64)  # after metadata and hooks


def test_private_signatures_of_triton() -> None:
    def kernel(x, none, number, width) -> None:
        pass

    runner = compiler.CompiledKernel.__getitem__(Variant(), (1, 1, 1))  # type: ignore[arg-type]
    assert str(inspect.signature(compiler.CompiledKernel.__getitem__)) == "(self, grid)"
    assert str(inspect.signature(runner)) == "(*args, stream=None)"
    assert str(inspect.signature(JITFunction.run)) == "(self, *args, grid, warmup, **kwargs)"
    assert JITFunction(kernel).arg_names == ["x", "none", "number", "width"]
    assert inspect.getsource(JITFunction.run).rstrip().endswith("return kernel")


KEYS = """
import sys
import mambacache.kernels.gpu
from mambacache.kernels.gpu.common.launch import Launcher
modules = [module for name, module in sys.modules.items() if name.startswith("mambacache.kernels.gpu.")]
kernels = [x.kernel for module in modules for x in vars(module).values() if isinstance(x, Launcher)]
by_name = {f"{kernel.fn.__module__}.{kernel.fn.__name__}": kernel for kernel in kernels}
keys = {name: by_name[name].cache_key for name in sorted(by_name, reverse=sys.argv[1] == "backwards")}
print(*sorted(keys.items()))
"""


@pytest.mark.gpu  # only the oldest release that serves makes keys that depend on the order
def test_cache_keys_do_not_depend_on_the_order_of_calls() -> None:
    forwards, backwards = (
        subprocess.run([sys.executable, "-P", "-c", KEYS, order], capture_output=True, text=True, check=True).stdout
        for order in ("forwards", "backwards")
    )
    assert forwards == backwards and forwards.count("_kernel'") > 30
