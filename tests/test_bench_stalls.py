"""Long steps of an engine are noted with their compilations and garbage collections."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "stalls"


@pytest.fixture
def stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the module, which is imported as in a server and leaves nothing behind."""
    monkeypatch.setenv("MAMBACACHE_STALLS", str(tmp_path / "stalls"))
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.delitem(sys.modules, "sitecustomize", raising=False)
    module = import_module("sitecustomize")
    yield module
    gc.callbacks.remove(module.watch_collections)
    del sys.modules["sitecustomize"]


class Kernel:
    module, __name__ = "mambacache.kernels", "_scan_kernel"

    def _do_compile(self, seconds: float) -> str:
        time.sleep(seconds)
        return "compiled"


def test_a_long_step_is_noted_with_its_compilations_and_collections(stalls: ModuleType, tmp_path: Path) -> None:
    kind = type("Kernel", (Kernel,), {})
    stalls.watch_compilations(SimpleNamespace(JITFunction=kind))

    def step(seconds: float) -> str:
        gc.collect()
        return kind()._do_compile(seconds)

    core = SimpleNamespace(EngineCore=SimpleNamespace(step=step, step_with_batch_queue=lambda: None))
    stalls.watch_steps(core)
    assert core.EngineCore.step_with_batch_queue() is None
    assert core.EngineCore.step(0.15) == "compiled"
    (line,) = map(json.loads, (tmp_path / "stalls").read_text().splitlines())
    assert [*line["compiled"]] == ["mambacache.kernels._scan_kernel"]
    assert 0.15 <= line["compiled"]["mambacache.kernels._scan_kernel"] <= line["held"] - line["collected"]
    assert line["collected"] > 0


def test_a_module_is_changed_when_it_has_loaded(stalls: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    sys.meta_path.insert(0, stalls.Changed("colorsys", lambda module: setattr(module, "changed", module.rgb_to_hsv)))
    colorsys = import_module("colorsys")
    assert colorsys.changed is colorsys.rgb_to_hsv
    monkeypatch.delitem(sys.modules, "colorsys")
    assert not hasattr(import_module("colorsys"), "changed")
