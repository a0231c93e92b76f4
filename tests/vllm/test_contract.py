"""Check that the installed vLLM has all that the plugin builds on, and that one sentence says if a part is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from mambacache.vllm import contract

VLLM = Path(find_spec("vllm").origin).parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the files of the installed vLLM that the contract reads."""
    for file in ["_version.py", *contract.HOOKS]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(VLLM / file, tmp_path / file)
    return tmp_path


def test_files_are_of_the_version_that_was_asked_for() -> None:
    """The files come from another version if it stands before the installed version."""
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    asked = [path for path in paths if Path(path, "vllm").exists()]
    assert not asked or VLLM.is_relative_to(asked[0])


def test_the_installed_version_is_known(copy: Path) -> None:
    assert contract.difference() is None
    assert contract.difference(copy) is None


def rename(text: str) -> str:
    return text.replace("def _mamba_block_aligned_split(", "def _aligned_split(")


def add_parameter(text: str) -> str:
    return text.replace("def _preempt_request(\n        self,", "def _preempt_request(\n        self, reason,")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (rename, "has no vllm.v1.core.sched.scheduler.Scheduler._mamba_block_aligned_split"),
        (add_parameter, "changed vllm.v1.core.sched.scheduler.Scheduler._preempt_request"),
    ],
)
def test_changed_method_is_named(copy: Path, change: Callable[[str], str], sentence: str) -> None:
    path = copy / contract.SCHEDULER
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    found = contract.difference(copy)
    assert found is not None and sentence in found
    assert found.startswith("vLLM 0.3") and found.endswith("; it serves vLLM 0.32 and 0.33")


@pytest.mark.parametrize("file", contract.HOOKS)
def test_missing_file_is_named(copy: Path, file: str) -> None:
    (copy / file).unlink()
    first = next(iter(contract.HOOKS[file]))
    found = contract.difference(copy)
    assert found is not None
    assert f"has no vllm.{file.removesuffix('.py').replace('/', '.')}.{first};" in found


def test_command_line(copy: Path) -> None:
    command = [sys.executable, "-m", "mambacache.vllm.contract"]
    installed = subprocess.run(command, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    assert installed.stdout.startswith("mambacache knows all that it needs of this vLLM (")
    (copy / contract.SCHEDULER).unlink()
    changed = subprocess.run([*command, copy], capture_output=True, text=True)
    assert changed.returncode == 1
    assert "has no vllm.v1.core.sched.scheduler.Scheduler.__init__" in changed.stdout
