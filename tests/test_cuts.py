"""Check how few files a change touches, as ARCHITECTURE.md says, by changes from outside."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from cache_calls import hit, make, run_step, started
from mambacache.cache import admission, pool
from mambacache.cache.retention import EvictionOrder, Policy, Wish
from symbolic import text
from symbolic_driver import Job, run

ROOT = Path(__file__).resolve().parents[1]


class LastFirst(EvictionOrder):
    """Evict the block that was used last, whatever its group."""

    def first(self, requested: bool) -> int | None:
        return next(reversed([*self._spare, *self._used] if requested else self._spare), None)


class EverySecond(Policy):
    """Ask for a state after every second block."""

    def between(self, wishes: Mapping[int, Wish], start: int, end: int) -> list[tuple[Wish, int]]:
        every = range(start // 128 * 128 + 128, end, 128)
        return super().between(wishes, start, end) + [(Wish.MARKED, p) for p in every if p not in wishes]

    def wish(self, wishes: Mapping[int, Wish], position: int) -> Wish | None:
        return super().wish(wishes, position) or (Wish.MARKED if position % 128 == 0 else None)


def test_a_new_order_of_eviction_takes_a_single_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "EvictionOrder", LastFirst)
    rng = random.Random(0)
    jobs = [Job([*text(rng.choice((128, 200)), 1), *text(rng.randrange(1, 200), i)], 8) for i in range(20)]
    d = run(jobs, num_state_blocks=6, num_kv_blocks=14, max_num_seqs=3)  # checks every token of every answer
    assert d.cache.stats.states_evicted > 5


def test_a_new_wish_takes_a_single_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "Policy", EverySecond)
    cache = make()
    started(cache, "a", text(600))
    run_step(cache, "a", 600, sampled=1)
    assert [hit(cache, text(n)) for n in (600, 512, 400, 300, 200, 100)] == [576, 384, 384, 256, 128, 0]


def files_with(word: str, folders: Iterable[str]) -> set[str]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)) for path in paths if word in path.read_text()}


@pytest.mark.parametrize("name", ["decode_len", "log_end", "chunk_dst", "block_table_start"])
def test_an_index_array_stands_in_few_files(name: str) -> None:
    files = {path for path in files_with(name, ("mambacache", "kernels")) if "kernels/gpu" not in path}
    assert {"mambacache/plan.py", "kernels/indices.py"} <= files and len(files) <= 8
