"""The benchmark of chats runs, here on a CPU and a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy2

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("weights", [[], ["--random-weights"]], ids=["own weights", "random weights"])
def test_turns_hit_those_before_them(
    weights: list[str], tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_multiturn

    from mambacache import SamplingParams

    monkeypatch.setattr(bench_multiturn, "INSTRUCTIONS", 64)
    monkeypatch.setattr(bench_multiturn, "MESSAGE", 62)
    monkeypatch.setattr(bench_multiturn, "PARAMS", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    out = tmp_path / "out.json"
    model = tiny_model("qwen3_next")
    if weights:  # where there are none
        copy2(model / "config.json", tmp_path)
        model = tmp_path
    bench_multiturn.main([str(model), "--device", "cpu", "--chats", "3", "--turns", "3", "--json", str(out), *weights])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["cache"], row["turn"]) for row in rows] == [(on, turn) for on in (True, False) for turn in (1, 2, 3)]
    assert [row["prompt_tokens"] for row in rows[:3]] == [3 * (126 + 64 * turn) for turn in range(3)]
    assert [row["hit_tokens"] for row in rows] == [2 * 64, 3 * 64, 3 * 128, 0, 0, 0]
    assert all(0 < row["seconds"] <= row["p99"] for row in rows)
