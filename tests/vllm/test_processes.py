"""Engine core and workers in their own processes have right tokens and hits, and all of them end after the answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from watched import FOLDER, FULL, LAST_ANSWER, check_end, output_of, run, started, wait_for

CASES = ("tensor_host", "tensor", "engine", "tensor_mamba2", "pipeline", "data")
"""The first runs always, all with MAMBACACHE_FAMILIES=all."""
SCRIPT = "process_run.py"


@pytest.mark.parametrize("case", CASES if FULL else CASES[:1])
def test_processes_give_right_answers_and_end(case: str, tmp_path: Path) -> None:
    run(SCRIPT, case, tmp_path)


@pytest.mark.skipif(not FULL, reason="MAMBACACHE_FAMILIES=all runs it")
def test_two_ranks_find_states_in_files(tmp_path: Path) -> None:
    run(SCRIPT, "tensor_files", tmp_path)
    run(SCRIPT, "tensor_files", tmp_path, "again")


@pytest.mark.skipif(not FULL, reason="MAMBACACHE_FAMILIES=all runs it")
def test_a_stage_without_attention_is_refused(tmp_path: Path) -> None:
    """One sentence refuses it, and no process stays behind."""
    log = tmp_path / "log"
    with started(FOLDER / SCRIPT, "pipeline_refused", tmp_path / "model", log=log) as process:
        wait_for("a pipeline stage has 2 recurrent and 0 attention layers", process, log)
        assert process.wait(60)
        check_end(process, time.monotonic(), log, code=1)
    assert LAST_ANSWER not in output_of(log)
