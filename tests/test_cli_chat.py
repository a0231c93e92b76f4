"""`mambacache chat`: turns that hit, on a pipe and on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_process import PROCESS
from engine_driver import byte_tokenizer
from mambacache import LLM, SamplingParams
from mambacache.cli import main
from mambacache.engine.outputs import RequestOutput

ENGINE = {"device": "cpu", "kv_cache_bytes": 4_000_000, "checkpoint_budget_bytes": 1_000_000, "max_num_seqs": 4}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
LINES = ["A first line of more than sixty-four bytes, so that its state is kept. ", "And then?", "why"]


def chat(model: Path, text: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", str(model), *FLAGS, "--max-tokens=6", *flags])


def expected(model: Path, lines: list[str], max_tokens: int = 6) -> list[str]:
    llm, messages, answers = LLM(model, **ENGINE), [], []
    for line in lines:
        messages.append({"role": "user", "content": line.strip()})
        output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)[0]
        answers.append(output.outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def prompts_and_hits(err: str) -> list[tuple[int, int]]:
    return [(int(prompt), int(hit)) for prompt, hit in re.findall(r"^prompt (\d+), hit (\d+) of", err, re.MULTILINE)]


def test_a_conversation(text_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(text_model, "\n".join(["", *LINES]), monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out == "".join(f"{answer}\n" for answer in expected(text_model, LINES))
    (first, none), (second, hit), (third, more) = prompts_and_hits(err)
    assert none == 0 and hit == 64 and more >= 64 and first < second < third


def test_reset(text_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(text_model, f"{LINES[0]}\n/reset\nwhy\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out.endswith(f"{expected(text_model, ['why'])[0]}\n")
    assert prompts_and_hits(err)[1] == (len("<user>why</><assistant>"), 0)


def test_a_line_that_is_too_long_leaves_the_conversation(
    text_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x" * 500
    assert chat(text_model, f"{LINES[0]}\n{long}\nwhy\n", monkeypatch, "--max-model-len=300") == 1
    out, err = capsys.readouterr()
    assert out == "".join(f"{answer}\n" for answer in expected(text_model, [LINES[0], "why"]))
    assert "and the model takes 300 in all: shorten the prompt, or lower max_tokens; /reset begins anew" in err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_no_text_leaves_the_conversation(
    text_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str
) -> None:
    """Check a line that is no UTF-8, as each error handler of a locale decodes it."""
    given = io.BytesIO(f"{LINES[0]}\n".encode() + b"\xff\xfe\nwhy\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given, encoding="utf-8", errors=errors))
    assert main(["chat", str(text_model), *FLAGS, "--max-tokens=6"]) == 1
    out, err = capsys.readouterr()
    assert out == "".join(f"{answer}\n" for answer in expected(text_model, [LINES[0], "why"]))
    (said,) = [line for line in err.splitlines() if line.startswith("mambacache: ")]
    assert said.startswith("mambacache: the messages cannot be encoded by the tokenizer (")
    assert said.endswith("change them; /reset begins anew")


def test_ctrl_c_ends_the_answer(
    text_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, calls = LLM.stream, []

    def interrupted(llm: LLM, prompt: Any, params: Any) -> Iterator[RequestOutput]:
        calls.append(prompt)
        for output in stream(llm, prompt, params):
            yield output
            if len(calls) == 1 and len(output.outputs[0].token_ids) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    assert chat(text_model, f"{LINES[0]}\nwhy\n", monkeypatch) == 0
    out, err = capsys.readouterr()
    (whole,) = expected(text_model, [LINES[0]])
    cut, second = out.split("\n", 1)
    assert whole.startswith(cut) and cut != whole and second.strip()
    assert [hit for _, hit in prompts_and_hits(err)] == [0, 64]
    asked = byte_tokenizer().decode(calls[1])
    assert asked == f"<user>{LINES[0].strip()}</><assistant>{cut}</><user>why</><assistant>"


@pytest.mark.full
def test_a_terminal(text_model: Path) -> None:
    """It asks for lines, beside the answers; Ctrl-C there leaves with 130, Ctrl-D with 0."""
    for ending, code in ((b"\x04", 0), (signal.SIGINT, 130)):
        ours, theirs = pty.openpty()
        command = [*PROCESS, "chat", text_model, *FLAGS, "--max-tokens=2"]
        with subprocess.Popen(
            command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TERM": "dumb"}
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            os.close(theirs)
            while not process.stderr.readline().startswith(b"/reset begins anew"):
                pass
            assert process.stderr.read(2) == b"> "
            os.write(ours, b"why\n")
            while not process.stderr.readline().startswith(b"prompt "):
                pass
            time.sleep(0.5)  # until it asks again
            if isinstance(ending, bytes):
                os.write(ours, ending)
            else:
                process.send_signal(ending)
            said, answers = process.stderr.read(), process.stdout.read()
        os.close(ours)
        assert (process.returncode, said) == (code, b"> ")
        assert answers.decode() == f"{expected(text_model, ['why'], 2)[0]}\n"
