"""The scheduler benchmark runs, and what it measures grows with its size, not with the square of it."""

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


def test_schedule_does_not_grow_with_what_the_requests_have_read(bench: ModuleType) -> None:
    small, large = (min(bench.time_schedule(32, n, steps=30) for _ in range(3)) for n in (512, 512 * FACTOR))
    assert large < FACTOR / 2 * small


def test_match_grows_linearly_with_the_prompt(bench: ModuleType) -> None:
    small, large = (min(bench.time_match(n, repeats=20) for _ in range(3)) for n in (6400, 6400 * FACTOR))
    assert 0 < large < ALLOWED * small
