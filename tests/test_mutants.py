"""Check the list of planted mistakes, and that `plant.py` tells a mistake that a test sees from one that it misses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plant import LIST, ROOT, Mutant, mutants

SEEN_AND_MISSED = """
# The order of the waiting line.
mambacache/scheduler/waiting_line.py tests/test_scheduler_waiting_line.py
{seen}

mambacache/scheduler/waiting_line.py tests/test_scheduler_waiting_line.py
{missed}
"""


def test_every_mistake_of_the_list_can_be_planted() -> None:
    listed = mutants(LIST.read_text())
    assert len(listed) > 150 and len({(each.path, each.old, each.new) for each in listed}) == len(listed)
    for mutant in listed:
        compile(mutant.source(), mutant.path, "exec")
        path, name = mutant.test.partition("[")[0].split("::")
        assert f"def {name}(" in (ROOT / path).read_text(), mutant.test


def test_old_lines_stand_once() -> None:
    source = (ROOT / "mambacache/plan.py").read_text()
    for old in ("no such line", *{line for line in source.splitlines() if source.count(f"\n{line}\n") > 1}):
        with pytest.raises(ValueError, match="times, not once"):
            Mutant("mambacache/plan.py", "", old, "").source()


def test_a_mistake_that_no_test_sees_is_told(tmp_path: Path) -> None:
    seen = "-        heappush(self._heap, (request.arrival, self._pushes, request))\n"
    seen += "+        heappush(self._heap, (-request.arrival, self._pushes, request))"
    missed = "-        self._clean_at = 1024  # pushes\n+        self._clean_at = 1023  # pushes"
    (tmp_path / "list").write_text(SEEN_AND_MISSED.format(seen=seen, missed=missed))
    code = f"from pathlib import Path; import plant; plant.main(Path({str(tmp_path / 'list')!r}))"
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(LIST.parent)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "1 of 2 mistakes are not seen\n"
    assert missed.replace("-", "").replace("+", "") in done.stdout and "arrival" not in done.stdout
