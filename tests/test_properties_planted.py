"""The symbolic runner sees mistakes: each planted change of a plan's arrays raises, or gives other tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mambacache.plan import StepPlan
from symbolic import answer, text
from symbolic_driver import Driver, Job, Mix

Change = Callable[[dict[str, np.ndarray]], None]


def change(
    name: str, how: Callable[[np.ndarray], Any], when: Callable[[np.ndarray], bool] = lambda a: len(a) > 0
) -> Change:
    def planted(arrays: dict[str, np.ndarray]) -> None:
        if when(arrays[name]):
            arrays[name] = np.asarray(how(arrays[name].copy()), dtype=np.int32)

    return planted


def chunk_dst_one_early(arrays: dict[str, np.ndarray]) -> None:
    dst = arrays["chunk_dst"]
    for i in range(1, len(dst) - 1):
        if dst[i] and not dst[i - 1]:
            dst[i - 1], dst[i] = dst[i], 0


CHANGES = {
    "no change": None,
    "src of another row": change("src", lambda a: np.roll(a, 1), lambda a: len(set(a.tolist())) > 1),
    "fresh src": change("src", np.zeros_like),
    "src off by one": change("src", lambda a: a + (a > 0)),
    "decode src of another row": change("decode_src", lambda a: np.roll(a, 1), lambda a: len(a) > 1),
    "log of another row": change("log_slot", lambda a: np.roll(a, 1), lambda a: len(a) > 1),
    "log from one entry later": change("log_start", lambda a: a + 1),
    "log from entry 0": change("log_start", np.zeros_like),
    "log that is one entry longer": change("log_end", lambda a: a + 1),
    "log without its last entry": change("log_end", lambda a: a - 1),
    "one token more": change("decode_len", lambda a: a + 1),
    "one token fewer": change("decode_len", lambda a: a - 1),
    "dst of another row": change("decode_dst", lambda a: np.roll(a, 1), lambda a: len(set(a.tolist())) > 1),
    "no fold": change("decode_dst", np.zeros_like),
    "fold into the state that is read": change("decode_dst", lambda a: np.where(a > 0, a - 1, a)),
    "checkpoint one chunk early": chunk_dst_one_early,
    "slots of the next token": change("kv_slot", lambda a: np.where(a >= 0, a + 1, a)),
    "shared slots written": change("kv_slot", lambda a: np.where(a < 0, a.max() + 1, a), lambda a: bool((a < 0).any())),
    "slots not written": change("kv_slot", lambda a: np.full_like(a, -1)),
    "pages of another row": change("block_table_start", lambda a: np.append(0, a[:-1]), lambda a: len(a) > 2),
    "first page of another row": change("block_table", lambda a: np.roll(a, 1), lambda a: len(a) > 1),
    "one token of KV missing": change("kv_len", lambda a: a - 1),
    "another token": change("tokens", lambda a: (a + 1) % 40),
    "positions from 0": change("positions", lambda a: a - a.min()),
    "logits of the token before": change("logits_index", lambda a: np.maximum(a - 1, 0)),
}  # fmt: skip


def traffic(planted: Change | None) -> None:
    first = text(120)
    turn = first + answer(first, 40, attention=True) + text(30, 3)
    second = text(100) + text(150, 1)
    jobs = [Job(first, 40), Job(second, 30), Job(turn, 20, arrives=25), Job(second + text(40, 4), 5, arrives=25)]
    cache = {"num_state_blocks": 40, "num_kv_blocks": 40, "max_draft_tokens": 3}
    d = Driver(Mix(jobs, budget=300, draft_errors=4, cache=cache))
    execute = d.cache.runner.execute

    def with_mistake(plan: StepPlan, *args: Any, **options: Any) -> list[list[int]]:
        arrays = dict(plan.arrays)
        if planted is not None:
            planted(arrays)
        return execute(replace(plan, arrays=arrays), *args, **options)

    d.cache.runner.execute = with_mistake  # type: ignore[method-assign]
    d.run()


@pytest.mark.parametrize("name", CHANGES)
def test_a_planted_mistake_is_seen(name: str) -> None:
    if CHANGES[name] is None:
        traffic(None)
        return
    with pytest.raises((AssertionError, IndexError)):
        traffic(CHANGES[name])
