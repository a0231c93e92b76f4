"""Plant the mistakes of mutants.txt in the cache, the scheduler and the plan: the test named with each must fail.

`make mutants` runs this file. Each mistake has a process of its own, and is planted there when its module is imported:
no file changes.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from importlib.machinery import SourceFileLoader
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.txt")
SLOW = ("numpy", "torch", "hypothesis")
"""Modules that are imported before processes fork, since they take long and hold no mistake."""

OPTIONS = ["--exitfirst", "--quiet", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-m"]
SECONDS = 30
"""A test that takes longer on the CPU fails."""


class Mutant(NamedTuple):
    """Name a mistake: lines of a file, the lines in their place, and the test that fails then."""

    path: str
    test: str
    old: str
    new: str

    def source(self) -> str:
        """Return the file with the mistake.

        Raises:
            ValueError: if the file does not have the old lines exactly once.
        """
        source = f"\n{(ROOT / self.path).read_text()}"
        if (count := source.count(f"\n{self.old}\n")) != 1:
            raise ValueError(f"{self.path} has these lines {count} times, not once:\n{self.old}")
        return source.replace(f"\n{self.old}\n", f"\n{self.new}\n")[1:]


def mutants(text: str) -> list[Mutant]:
    """Return the mistakes of a text in the format of mutants.txt."""
    found = []
    for paragraph in text.split("\n\n"):
        header, *changed = [line for line in paragraph.splitlines() if line and not line.startswith("#")] or [""]
        if changed:
            path, test = header.split(" ", 1)
            old, new = ("\n".join(line[1:] for line in changed if line[0] == sign) for sign in "-+")
            found.append(Mutant(path, test, old, new))
    return found


def run(tests: list[str], mutant: Mutant | None) -> None:
    """Run tests in this process, with a mistake or without, and exit with pytest's status."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    if mutant is not None:
        path, source, get_code = str(ROOT / mutant.path), mutant.source(), SourceFileLoader.get_code

        def planted(loader: SourceFileLoader, name: str) -> CodeType | None:
            return compile(source, path, "exec") if loader.path == path else get_code(loader, name)

        SourceFileLoader.get_code = planted  # type: ignore[method-assign]
        signal.signal(signal.SIGVTALRM, lambda *_: pytest.fail(f"longer than {SECONDS} s"))
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    os._exit(pytest.main([*OPTIONS, "", *tests]))


def unseen(listed: list[Mutant], processes: int = 2) -> list[Mutant]:
    """Return the mistakes that do not make their test fail, in the order in which this is known."""
    waiting, left, fork = list(listed), list[Mutant](), get_context("fork")
    running: dict[int, tuple[Mutant, BaseProcess]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            mutant = waiting.pop(0)
            process = fork.Process(target=run, args=([mutant.test], mutant))
            process.start()
            running[process.sentinel] = mutant, process
        for ended in connection.wait(running):
            mutant, process = running.pop(ended)  # type: ignore[index]
            process.join()
            if process.exitcode != pytest.ExitCode.TESTS_FAILED:
                left.append(mutant)
    return left


def main(path: Path = LIST) -> None:
    listed = mutants(path.read_text())
    for mutant in listed:
        mutant.source()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in SLOW:
        import_module(name)
    left = unseen(listed)
    for mutant in left:
        print(f"{mutant.test} does not fail on this mistake in {mutant.path}:\n{mutant.old}\n{mutant.new}\n")
    sys.exit(f"{len(left)} of {len(listed)} mistakes are not seen" if left else 0)


if __name__ == "__main__":
    main()
