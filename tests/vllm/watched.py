"""Run scripts in sessions of their own. They must end soon after their last answer, children included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
FULL = os.environ.get("MAMBACACHE_FAMILIES") == "all"
"""This says whether all cases run, or only the cases that continuous integration has time for."""
SECONDS = 20.0
"""The last process must end in this time after the last answer."""
LAST_ANSWER = "the last answer is here"


def alive(session: int) -> list[str]:
    """Return the processes of a session, zombies aside."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # no process, or it ended meanwhile
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            state, _, _, of = rest.split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(f"{entry.name} {name} ({state})")
    return found


def output_of(log: Path) -> str:
    """Return the end of a log and its first traceback: the cause, if processes fail one after another."""
    text = log.read_text()
    cause = text.find("Traceback")
    return (f"{text[cause:][:8000]}\n...\n" if cause >= 0 else "") + text[-8000:]


@contextmanager
def started(
    *command: str | Path, log: Path, path: Path = FOLDER, cwd: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python script with its output in a file. Kill the rest of its session at the end."""
    searched = [FOLDER.parent, FOLDER, path, *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", *command],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, searched)), **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for left in alive(process.pid):
            with suppress(ProcessLookupError):
                os.kill(int(left.split()[0]), signal.SIGKILL)
        process.wait()


def check_end(process: subprocess.Popen[bytes], since: float, log: Path, code: int = 0) -> None:
    """Fail unless all of a script's processes end in time."""
    while left := alive(process.pid):
        assert time.monotonic() - since < SECONDS, f"{left} after the last answer:\n{output_of(log)}"
        time.sleep(0.05)
    assert process.wait() == code, output_of(log)


def check_idle(states: Any) -> None:
    """Fail unless a scheduler's cache is consistent, and no request holds a state."""
    states.check()
    blocks = states.stats.state_blocks
    assert blocks["writing"] == 0 and blocks["committed"] == blocks["evictable"]


def wait_for(text: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 280) -> None:
    until = time.monotonic() + seconds
    while True:
        ended = process.poll() is not None
        if text in log.read_text():
            return
        assert not ended and time.monotonic() < until, f"no {text!r}:\n{output_of(log)}"
        time.sleep(0.05)


def run_to_its_end(log: Path, script: str, *arguments: str | Path, **settings: str) -> None:
    """Fail unless all answers are right, and all processes end."""
    with started(FOLDER / script, *arguments, log=log, **settings) as process:
        wait_for(LAST_ANSWER, process, log)
        check_end(process, time.monotonic(), log)


def run(script: str, name: str, folder: Path, *arguments: str) -> None:
    """Run a script that fails if an answer is wrong, with a name and a new folder to work in."""
    run_to_its_end(folder / "log", script, name, folder / name, *arguments)
