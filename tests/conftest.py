"""Skip tests marked `gpu` or `gpu_full` where there is no CUDA device, and make engines on tiny models.

Without a device, the GPU kernels run in Triton's interpreter.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine_driver import Engines, Original


def pytest_configure() -> None:
    import torch

    worker, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), torch.cuda.device_count()
    if count > 1:  # before CUDA is initialised: each worker has another first device
        names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
        own = int(worker.removeprefix("gw")) % count
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[own:] + names[:own])
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at its import, and other packages import Triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("gpu_full")]
    if not marked:
        return
    import torch

    items.sort(key=_turn)
    if "compiled" in getattr(items[-1], "fixturenames", ()):
        items.insert(0, items.pop())  # its worker compiles while the other workers run tests without compiled kernels
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _turn(item: pytest.Item) -> int:
    """Return 0 for a test without `compiled` kernels, 1 for a test with them, 2 for a short test with a single `case`.

    Tests with 0 run while kernels compile. Short tests run last, so that all workers end together.
    """
    if "compiled" not in getattr(item, "fixturenames", ()):
        return 0
    return 2 if hasattr(item, "callspec") and "case" in item.callspec.params else 1


def pytest_runtest_teardown() -> None:
    """Give the GPU's memory back, so that several workers can share it."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a GPU test again, at most 15 times, while other workers leave it too little GPU memory.

    A test with the fixture `engine` runs once: its engines keep the memory of the first attempt.
    """
    if "engine" in pyfuncitem.fixturenames or not any(map(pyfuncitem.get_closest_marker, ("gpu", "gpu_full"))):
        return None
    import torch

    names = signature(pyfuncitem.obj).parameters.keys() & pyfuncitem.funcargs.keys()  # others have defaults
    given = {name: pyfuncitem.funcargs[name] for name in names}
    for _ in range(15):
        try:
            pyfuncitem.obj(**given)
            return True
        except torch.OutOfMemoryError:
            pass  # until here the error holds the test's tensors
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(2)
    return None


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile all kernels of the session's tests with this fixture, side by side, in one worker."""
    from filelock import FileLock

    from gpu_cases import compile_ahead, kernels_of

    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process-{os.getpid()}")
    done = tmp_path_factory.getbasetemp().parent / f"compiled-{session}"
    items = [item for item in request.session.items if "compiled" in item.fixturenames and hasattr(item, "callspec")]
    with FileLock(f"{done}.lock"):
        if not done.exists():
            compile_ahead(kernel for item in items for kernel in kernels_of(item.callspec.params))
            done.touch()


@pytest.fixture(params=["reference", "interpreted"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Send the ops to plain torch, or to the GPU's kernels in Triton's interpreter."""
    import torch

    from mambacache.kernels import api, experts, gpu, reference

    if request.param == "interpreted" and torch.cuda.is_available():
        pytest.skip("the GPU itself runs them")
    for ops in (api, experts):
        monkeypatch.setattr(ops, "backend", lambda x: reference if request.param == "reference" else gpu)
    return request.param


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a tiny model's name to its directory, which is made once."""
    from tiny_models import save_tiny_model

    return cache(lambda name: save_tiny_model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def original(tiny_model: Callable[[str], Path]) -> Callable[[str], Original]:
    """Return a function from a tiny model's name to its original."""
    from engine_driver import Original

    return cache(lambda name: Original(tiny_model(name)))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny model with a tokenizer of bytes and a chat template."""
    from engine_driver import save_text_model

    return save_text_model(tmp_path_factory.mktemp("text_model"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Iterator[Engines]:
    """Make engines on tiny models: tests of the engine get engines in no other way."""
    from engine_driver import Engines

    with Engines(tiny_model, request.param) as engines:
        yield engines
    engines.check()
