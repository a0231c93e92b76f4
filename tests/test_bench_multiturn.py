"""The benchmark of chats runs, here on a CPU and a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_turns_hit_those_before_them(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_multiturn

    from mambacache import SamplingParams

    monkeypatch.setattr(bench_multiturn, "INSTRUCTIONS", 64)
    monkeypatch.setattr(bench_multiturn, "MESSAGE", 62)
    monkeypatch.setattr(bench_multiturn, "PARAMS", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    out = tmp_path / "out.json"
    model = str(tiny_model("qwen3_next"))
    bench_multiturn.main([model, "--device", "cpu", "--chats", "3", "--turns", "3", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["cache"], row["turn"]) for row in rows] == [(on, turn) for on in (True, False) for turn in (1, 2, 3)]
    assert [row["prompt_tokens"] for row in rows[:3]] == [3 * (126 + 64 * turn) for turn in range(3)]
    assert [row["hit_tokens"] for row in rows] == [2 * 64, 3 * 64, 3 * 128, 0, 0, 0]
    assert all(0 < row["seconds"] <= row["p99"] for row in rows)
