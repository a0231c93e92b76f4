"""Check which peer the kernel benchmark calls the fastest, and how its tables name peers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TIMES = {"graph": {"ours": 200.0, "vLLM": 900.0, "FlashInfer": 500.0}}
TIMES["eager"] = {"ours": 300.0, "vLLM": 650.0, "FlashInfer": 800.0}
ERRORS = {"ours": 0.5, "vLLM": 0.25, "FlashInfer": 0.75}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


class TwoPeers:
    """Hold calls that return their names, by which they are timed."""

    op, nbytes, flops, exponentials = "gated_delta_rule", 1 << 30, 0, 0

    def ours(self) -> str:
        return "ours"

    def peers(self) -> dict[str, Any]:
        return {name: partial(str, name) for name in ("vLLM", "FlashInfer")}

    def copy(self) -> None:
        return None

    def exact(self) -> list[torch.Tensor]:
        return [torch.ones(2, dtype=torch.float64)]

    def results(self, call: Any, *, of_peer: bool) -> list[torch.Tensor]:
        assert of_peer == (call() != "ours")
        return [torch.ones(2) + ERRORS[call()]]


def rows_of(case: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    import bench_kernels

    for mode in TIMES:
        monkeypatch.setattr(bench_kernels, f"{mode}_us", lambda calls, _, mode=mode: TIMES[mode][calls[0]()])
    return list(bench_kernels.measure("1 x 8192", case, 1e12, 1, errors=True))


def test_the_peer_is_the_fastest_in_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench_kernels import format_row

    graph, eager = rows_of(TwoPeers, monkeypatch)
    assert (graph["peer_us"], graph["peer_error"]) == (500, 0.75)
    assert (eager["peer_us"], eager["peer_error"]) == (650, 0.25)
    assert graph["peers_us"] == {"vLLM": 900, "FlashInfer": 500}
    assert format_row(graph).split()[-6:] == ["200.0", "900.0", "500.0", "1073.7", "-", "2.50x"]


def test_a_peer_without_a_graph_time_is_not_the_fastest() -> None:
    from bench_kernels import against

    found = against({"vLLM": 900.0, "FlashInfer": None}, {"vLLM": 0.5, "FlashInfer": 0.25})
    assert (found["peer_us"], found["peer_error"]) == (900, 0.5)
    assert against({}, {}) == {"peer_us": None, "peer_error": None, "peers_us": {}}


def test_without_vllm_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench_kernels import format_row

    class NoPeers(TwoPeers):
        def peers(self) -> dict[str, Any]:
            raise ImportError

    graph, _ = rows_of(NoPeers, monkeypatch)
    assert graph["ours_us"] == 200 and graph["peer_us"] is None
    assert format_row(graph).split()[-6:] == ["200.0", "-", "-", "1073.7", "-", "-"]


def test_the_table_names_the_fastest_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was measured beside vLLM alone names vLLM."""
    import table

    before = {"op": "ssd", "case": "8 x 1024", "mode": "graph", "ours_us": 196.0, "peer_us": 608.0, "floor_us": 98.0}
    rows = [*rows_of(TwoPeers, monkeypatch), before, before | {"case": "batch 16, vLLM replays", "ours_us": 98.0}]
    cases = {"gated_delta_rule": ("1 x 8192",), "ssd": ("8 x 1024", "batch 16, vLLM replays")}
    monkeypatch.setattr(table, "CASES", cases)
    assert table.kernel_table({"rows": rows}).splitlines()[2:] == [
        "| `gated_delta_rule` | 1 x 8192 | 200 | 500 FlashInfer | 0.40 | 537% |",
        "| `ssd` | 8 x 1024 | 196 | 608 vLLM | 0.32 | 50% |",
        "| `ssd` | batch 16 | 98.0 | 608 vLLM replays | 0.16 | 100% |",
    ]
