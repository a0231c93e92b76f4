"""Check the rounds and the table of the engine benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_rounds_take_turns_and_the_median_is_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_engine

    asked = []

    def run_apart(_: argparse.Namespace, engine: str) -> list[dict]:
        asked.append(engine)
        return [{"workload": "cold", "engine": engine, "times": [float(len(asked)), 10.0], "hit_tokens": len(engine)}]

    monkeypatch.setattr(bench_engine, "run_apart", run_apart)
    engines = ["ours", "plugin", "vllm"]
    *_, rows = bench_engine.compare(argparse.Namespace(rounds=2, engines=engines))
    assert asked == [*engines, *reversed(engines)]
    assert [row["engine"] for row in rows] == engines
    assert rows[0]["times"] == [1, 10, 6, 10] and rows[0]["seconds"] == 8


def test_table_is_beside_the_faster_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of our engines has a column and its ratio to that vLLM. A run without an engine has no column for it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from table import engine_table

    found = {"vllm": (2.0, 10), "vllm, FlashInfer": (1.0, 20), "plugin": (0.5, 3000), "ours": (0.25, 4000)}
    rows = [
        {"workload": "cold", "engine": engine, "seconds": seconds, "hit_tokens": hits}
        for engine, (seconds, hits) in found.items()
    ]
    head, _, line = engine_table({"rows": rows}).splitlines()
    assert head.startswith(
        "| workload | own engine | plugin | vLLM alone | vLLM with FlashInfer's prefill | ratio: own "
    )
    assert line == "| cold | 0.250 | 0.500 | 2.000 | 1.000 | 0.25 | 0.50 | 4,000 | 3,000 | 20 |"
    head, _, line = engine_table({"rows": [rows[0], rows[2]]}).splitlines()
    assert head == "| workload | plugin | vLLM alone | ratio: plugin | hit: plugin | vLLM |"
    assert line == "| cold | 0.500 | 2.000 | 0.25 | 3,000 | 10 |"
