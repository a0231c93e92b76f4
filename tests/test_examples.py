"""Check that the examples run unchanged and print their result. Tests in vllm/ run the examples of vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from selection import some

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHOWN = {
    "generate": "Lima .  (0 of 304 tokens hit, lost: nothing)\nRome .  (256 of 304 tokens hit",
    "stream": "Lima .  (0 of 304 tokens hit)\n['Lima .', 'Rome']\n['Lima .', 'Rome .']\n",
    "chat": "where is Ada ? Lima .  (0 of 304 tokens hit)\nwhere is Max ? Rome .  (256 of 310 tokens hit)",
    "async_chat": "['Lima .', 'Rome .']\nabort\n",
    "host_engine": "first: 0 of 141 tokens hit\nsecond: 128 of 141 tokens hit\n",
}


@pytest.mark.parametrize("name", some(2, SHOWN))
def test_example(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", EXAMPLES / f"{name}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHOWN, "vllm_client", "router"}
