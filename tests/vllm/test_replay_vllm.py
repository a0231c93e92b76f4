"""The replay through vLLM's scheduler counts the hits of a trace."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from replay_vllm import Row, replay, scheduler_of, write
from trace_tokens import Request


def test_repeated_prompts_and_next_turns_are_hit() -> None:
    prompt, answer = np.arange(300, dtype=np.int32), np.arange(1000, 1030, dtype=np.int32)
    turn = np.concatenate([prompt, answer, np.arange(2000, 2100, dtype=np.int32)])
    trace = [Request(each, answer, 0, False) for each in (prompt, prompt, turn, turn[:400])]
    hits, median = replay(scheduler_of(40, 100), trace, rate=0.01, speed=1000, seed=2)
    assert hits == 256 + 320 + 384
    assert median == pytest.approx((44 + 110) / 2 / 1000)


def test_a_row_replaces_the_row_of_the_same_run(tmp_path: Path) -> None:
    path, first = tmp_path / "rows.json", Row("t", 9, "m", 5, 20, 5, 1000, 2, False, 0.1, 0.25)
    write(path, first)
    write(path, replace(first, by_last_use=True, share=0.1))
    write(path, replace(first, first_token_median=0.2, share=0.5))
    assert [row["share"] for row in json.loads(path.read_text())["rows"]] == [0.1, 0.5]
