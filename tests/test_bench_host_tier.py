"""The benchmark of the tier in host memory runs, here on a CPU and a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_it_measures(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_host_tier

    monkeypatch.setattr(bench_host_tier, "REPEATS", 1)
    out = tmp_path / "out.json"
    bench_host_tier.main([
        str(tiny_model("qwen3_next")), "--device", "cpu", "--tokens", "300", "--rows", "2", "--steps", "3",
        "--checkpoint-budget-bytes", "200000", "--kv-cache-bytes", "600000", "--host-cache-bytes", "100000000",
        "--json", str(out),
    ])  # fmt: skip
    row = json.loads(out.read_text())["rows"][0]
    assert row["tokens"] == 300 and min(value for value in row.values() if isinstance(value, float)) > 0
    assert row["num_bytes"] > 4 * 32768 and "slowed by" in capsys.readouterr().out
