"""The benchmark of engines: its workloads on our own, here on a CPU and a tiny model; what it makes of rounds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mambacache import LLM
from mambacache.engine.stepper import Stepper

ROOT = Path(__file__).resolve().parents[1]


def test_our_engine(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_engine

    limits = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 512, "device": "cpu"}
    small = {"REQUESTS": 2, "SHARED": ((128, 64),), "VOCABULARY": 100, "DECODED": 3, "LIMITS": limits}
    for name, value in small.items():
        monkeypatch.setattr(bench_engine, name, value)
    rows = bench_engine.measure_ours(argparse.Namespace(model=str(tiny_model("qwen3_next"))), "ours")["rows"]
    found = {row["workload"]: (row["hit_tokens"], row["prompt_tokens"]) for row in rows}
    assert found == {
        "cold, 2 x 192": (0, 384),
        "2 x (128 shared + 64) at once, nothing cached": (128, 384),
        "2 x (128 shared + 64)": (256, 384),
        "decode 2 x 3 after 512": (0, 1024),
        "decode 1 x 3 after 512": (0, 512),
    }
    assert all(min(row["times"]) > 0 for row in rows)


class Clock:
    """For an event on a stream that is never behind: the time at which it was recorded, in ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = 1e3 * time.perf_counter()

    def elapsed_time(self, other: Clock) -> float:
        return other.at - self.at


def test_how_long_a_device_idles(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_engine

    for name, value in {"REQUESTS": 2, "DECODED": 8}.items():
        monkeypatch.setattr(bench_engine, name, value)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with LLM(tiny_model("qwen3_next"), device="cpu", max_num_seqs=2, max_model_len=256) as llm:
        brief = bench_engine.idle_share(llm)
        advance = Stepper.advance
        monkeypatch.setattr(Stepper, "advance", lambda self: (time.sleep(0.1), advance(self)))
        assert brief < 0.5 < bench_engine.idle_share(llm) < 1


def test_rounds_take_turns_and_the_median_is_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_engine

    asked = []

    def run_apart(_: argparse.Namespace, engine: str) -> dict:
        asked.append(engine)
        row = {"workload": "cold", "engine": engine, "times": [float(len(asked)), 10.0], "hit_tokens": len(engine)}
        return {"rows": [row], **({"host_ms": float(len(asked))} if engine == "plugin" else {})}

    monkeypatch.setattr(bench_engine, "run_apart", run_apart)
    engines = ["ours", "plugin", "vllm"]
    counts = []
    for rows, beside in bench_engine.compare(argparse.Namespace(rounds=2, engines=engines)):
        counts.append((len(rows), len(beside.get("host_ms_of_a_decode_step", []))))
    assert asked == [*engines, *reversed(engines)]
    assert counts == [(1, 0), (2, 1), (3, 1), (3, 1), (3, 2), (3, 2)]
    assert beside == {"host_ms_of_a_decode_step": [2, 5]}
    assert [row["engine"] for row in rows] == engines
    assert rows[0]["times"] == [1, 10, 6, 10] and rows[0]["seconds"] == 8 and rows[0]["best"] == 1


def test_table_is_beside_the_faster_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our engines in columns of their own, each against it; a run without one of them has no column for it."""
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
