"""The part of the benchmark against vLLM that runs our own engine, here on a CPU and a tiny model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_our_engine(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_vllm

    limits = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 512, "device": "cpu"}
    small = {"REQUESTS": 2, "SHARED": ((128, 64),), "VOCABULARY": 100, "DECODED": 3, "LIMITS": limits}
    for name, value in small.items():
        monkeypatch.setattr(bench_vllm, name, value)
    rows = bench_vllm.measure_ours(argparse.Namespace(model=str(tiny_model("qwen3_next"))), "ours")["rows"]
    found = {row["workload"]: (row["hit_tokens"], row["prompt_tokens"]) for row in rows}
    assert found == {
        "cold, 2 x 192": (0, 384),
        "2 x (128 shared + 64) at once, nothing cached": (128, 384),
        "2 x (128 shared + 64)": (256, 384),
        "decode 2 x 3 after 512": (0, 1024),
        "decode 1 x 3 after 512": (0, 512),
    }
    assert all(min(row["times"]) > 0 for row in rows)
