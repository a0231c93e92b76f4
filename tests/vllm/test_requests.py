"""Requests of every kind in vLLM have right tokens and hits, and write no state but their own.

`request_run.py` describes each case, and runs it in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from watched import FULL, run

ALWAYS = "hits", "few_of_both", "host_states", "connector", "connector_failing_between_steps"
CASES = (*ALWAYS, "few_pages", "few_states", "connector_between_steps", "connector_failing")
"""All of them run with MAMBACACHE_FAMILIES=all."""


@pytest.mark.parametrize("steps", ["one at a time", "ahead"] if FULL else ["one at a time"])
@pytest.mark.parametrize("case", CASES if FULL else ALWAYS)
def test_requests(case: str, steps: str, tmp_path: Path) -> None:
    run("request_run.py", case, tmp_path, steps)


@pytest.mark.parametrize("steps", ["one at a time", "ahead"] if FULL else ["ahead"])
def test_a_request_with_bad_logits_costs_itself_alone(steps: str, tmp_path: Path) -> None:
    run("nan_run.py", "nan", tmp_path, steps)
