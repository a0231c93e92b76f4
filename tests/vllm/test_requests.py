"""Requests of every kind in vLLM have right tokens and hits, and write no state but their own.

`request_run.py` describes each case, and runs it in a process of its own.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from watched import FOLDER, FULL, LAST_ANSWER, check_end, run, started, wait_for

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


def test_a_restart_finds_states_in_files(tmp_path: Path) -> None:
    """Processes run one after another on the same folders."""
    every = "first", "again", "damaged", "other", "full", "reset", "after_reset"
    for part in every if FULL else ("first", "again", "other"):
        log = tmp_path / f"log of {part}"
        with started(FOLDER / "disk_run.py", part, tmp_path, log=log) as process:
            wait_for(LAST_ANSWER, process, log)
            check_end(process, time.monotonic(), log)
