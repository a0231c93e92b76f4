"""Requests of every kind in vLLM have right tokens and hits, and write no state but their own.

`request_run.py` describes each case, and runs it in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from watched import FULL, run

CASES = (
    "hits",
    "few_of_both",
    "host_states",
    "few_pages",
    "few_states",
)  # the first three always, all with MAMBACACHE_FAMILIES=all


@pytest.mark.parametrize("steps", ["one at a time", "ahead"] if FULL else ["one at a time"])
@pytest.mark.parametrize("case", CASES if FULL else CASES[:3])
def test_requests(case: str, steps: str, tmp_path: Path) -> None:
    run("request_run.py", case, tmp_path, steps)


@pytest.mark.parametrize("steps", ["one at a time", "ahead"] if FULL else ["ahead"])
def test_a_request_with_bad_logits_costs_itself_alone(steps: str, tmp_path: Path) -> None:
    run("nan_run.py", "nan", tmp_path, steps)
