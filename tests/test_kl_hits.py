"""Measure how far answers after hits are from answers without: on a CPU in fp32, and with wrong states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mambacache import LLM

ROOT = Path(__file__).resolve().parents[1]
FEW = ["--device", "cpu", "--dtype", "float32", "--prompts", "3", "--tokens", "4"]


@pytest.fixture
def kl_hits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import kl_hits

    return kl_hits


@pytest.mark.parametrize("model", ["qwen3_next", "mamba2"])
def test_hits_change_no_answer(
    kl_hits: ModuleType, model: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    kl_hits.main([str(tiny_model(model)), *FEW, "--json", str(out)])
    found = json.loads(out.read_text())["kl"]
    assert len(found) == 4 and all(abs(value) < 1e-6 for value in found.values())


@pytest.mark.full
def test_wrong_states_are_seen(
    kl_hits: ModuleType, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All states are changed after the first run of each kind of writer."""
    run, runs = kl_hits.run, []

    def run_and_spoil(llm: LLM, *args: object, **params: object) -> object:
        found = run(llm, *args, **params)
        runs.append(params)
        if len(runs) in (4, 6, 8):  # the writers: prefill, decode, drafts
            for tensor in (tensor for layer in llm.runner.states.layers for tensor in layer):
                tensor.mul_(1.5)
        return found

    monkeypatch.setattr(kl_hits, "run", run_and_spoil)
    found = kl_hits.measure(str(tiny_model("qwen3_next")), 3, 4, device="cpu", dtype="float32")
    assert found.pop("no hit, other batch") < 1e-6
    assert all(value > 1e-4 for value in found.values())
