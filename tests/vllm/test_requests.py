"""Requests of every kind in vLLM: right tokens, hits as computed by hand, and no state written but where it should be.

Each case is described in `request_run.py`, which runs it in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from watched import FULL, run

CASES = ("hits", "few_of_both", "few_pages", "few_states")  # the first two always, all with MAMBACACHE_FAMILIES=all


@pytest.mark.parametrize("steps", ["one at a time", "ahead"] if FULL else ["one at a time"])
@pytest.mark.parametrize("case", CASES if FULL else CASES[:2])
def test_requests(case: str, steps: str, tmp_path: Path) -> None:
    run("request_run.py", case, tmp_path, steps)


@pytest.mark.parametrize("steps", ["one at a time", "ahead"] if FULL else ["ahead"])
def test_a_request_with_bad_logits_costs_itself_alone(steps: str, tmp_path: Path) -> None:
    run("nan_run.py", "nan", tmp_path, steps)
