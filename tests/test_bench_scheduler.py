"""The scheduler benchmark runs, and its times grow with the size, not with the square of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FACTOR = 8  # growth of the size
ALLOWED = 24  # growth of the time: linear would be 8, quadratic 64


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "bench_scheduler.py"
    spec = importlib.util.spec_from_file_location("bench_scheduler", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_schedule_grows_linearly_with_the_requests(bench: ModuleType) -> None:
    small, large = (min(bench.time_schedule(n, 256, steps=30) for _ in range(3)) for n in (16, 16 * FACTOR))
    assert 0 < large < ALLOWED * small


@pytest.mark.full
def test_schedule_time_does_not_grow_with_the_context(bench: ModuleType) -> None:
    small, large = (min(bench.time_schedule(32, n, steps=30) for _ in range(3)) for n in (512, 512 * FACTOR))
    assert large < FACTOR / 2 * small


def test_match_grows_linearly_with_the_prompt(bench: ModuleType) -> None:
    small, large = (min(bench.time_match(n, repeats=20) for _ in range(3)) for n in (6400, 6400 * FACTOR))
    assert 0 < large < ALLOWED * small


@pytest.mark.full
@pytest.mark.parametrize("shared", [0, 512])
def test_admission_grows_linearly_with_the_prompts(shared: int, bench: ModuleType) -> None:
    small, large = (bench.time_admission(n, shared, repeats=4, choose=min) for n in (64, 1024))
    assert 0 < large < 48 * small  # linear would be 16, quadratic 256


@pytest.mark.full
def test_admission_time_does_not_grow_with_running_requests(bench: ModuleType) -> None:
    few, many = (bench.time_mixed(64, decoding=n, repeats=5, choose=min) for n in (32, 32 * FACTOR))
    alone = bench.time_mixed(0, decoding=32 * FACTOR, repeats=5, choose=min)
    assert many - alone < 2 * few


@pytest.mark.full
def test_waiting_for_a_prefix_costs_nothing_per_step(bench: ModuleType) -> None:
    alone, crowded = (min(bench.time_waiting(n) for _ in range(2)) for n in (0, 10_000))
    assert crowded - alone < 1
    assert crowded < 2 * alone + 0.2


@pytest.mark.full
def test_aborting_all_that_wait_is_linear(bench: ModuleType) -> None:
    small, large = (min(bench.time_aborts(n) for _ in range(3)) for n in (8000, 32_000))
    assert large < 8 * small  # linear would be 4, quadratic 16


def test_exponents_and_limits_are_reported(bench: ModuleType) -> None:
    case = bench.Case("squares", "n", (10, 100), lambda n: n * n / 100, (None, 90.0), 50.0)
    assert bench.measure(case) == {
        "case": "squares", "unit": "n", "exponent": 2.0, "growth": 100.0, "most_growth": 50.0,
        "times": [
            {"number": 10, "median_ms": 1.0, "limit_ms": None}, {"number": 100, "median_ms": 100.0, "limit_ms": 90.0},
        ],
    }  # fmt: skip
    assert "exponent" not in bench.measure(bench.Case("one", "n", (5,), float, (7.0,)))
