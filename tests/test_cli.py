"""Check the output of `mambacache generate`, and the exit codes and sentences of all commands."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_process import PROCESS
from mambacache import LLM, SamplingParams
from mambacache.cli import main, plan
from mambacache.demo import MODEL
from mambacache.engine.outputs import RequestOutput
from mambacache.kernels import StatePool
from mambacache.runner.model_runner import ModelRunner
from selection import full

PROMPT = "A prompt of more than sixty-four bytes, so that it ends behind a boundary. "
SMALL = ["--device=cpu", "--kv-cache-bytes=4MB", "--checkpoint-budget-bytes=1MB", "--max-num-seqs=4", "--max-tokens=5"]


@pytest.fixture
def text(text_model: Path) -> Callable[[str], str]:
    """Return a function that gives the model's answer of 5 tokens."""
    llm = LLM(text_model, device="cpu", kv_cache_bytes=4_000_000, checkpoint_budget_bytes=0, max_num_seqs=4)
    return lambda prompt: llm.generate(prompt, SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text


def generate(model: Path, *arguments: str) -> list[str]:
    return ["generate", str(model), *SMALL, *arguments]


def test_generate(text_model: Path, text: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(generate(text_model, PROMPT, "two")) == 0
    out, err = capfd.readouterr()
    assert out == f"{text(PROMPT)}\n{text('two')}\n"
    assert f"prompt {len(PROMPT)}, hit 0 of 0 computed before (lost: none), first token after " in err


def test_jsonl_of_a_file(text_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = [PROMPT, PROMPT + "more", "ü"]
    (tmp_path / "prompts.txt").write_text("\n" + "\n \n".join(prompts) + "\n", encoding="utf-8")
    assert main(generate(text_model, "--jsonl", "--prompts", str(tmp_path / "prompts.txt"))) == 0
    out, err = capfd.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [(each["index"], each["prompt"]) for each in answers] == list(enumerate(prompts))
    assert [each["cache"]["prompt"] for each in answers] == [len(prompt.encode()) for prompt in prompts]
    assert [each["cache"]["hit"] for each in answers] == [0, 64, 0]
    for each in answers:
        assert sum(each["cache"]["losses"].values()) == each["cache"]["ceiling"] - each["cache"]["hit"]
        assert (each["finish_reason"], each["error"], len(each["token_ids"])) == ("length", None, 5)
        assert each["time_to_first_token"] > 0
    assert "prompts: 100%" in err and "3/3" in err


def test_jsonl_in(
    text_model: Path, text: Callable[[str], str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of every form on standard input, beside one of the arguments, each with parameters of its own."""
    said = [{"role": "user", "content": "two"}]
    lines = [
        {"prompt": PROMPT, "max_tokens": 3},
        {"prompt_token_ids": [5, 6]},
        {"messages": said, "n": 2, "logprobs": 1},
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n".join(map(json.dumps, lines))))
    assert main(generate(text_model, "--jsonl", "two", "-")) == 0
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(each["index"], each["answer"], each["prompt"]) for each in answers] == [
        *((0, 0, "two"), (1, 0, PROMPT), (2, 0, [5, 6])),
        *((3, 0, said), (3, 1, said)),
    ]
    assert [len(each["token_ids"]) for each in answers] == [5, 3, 5, 5, 5]
    assert [each["text"] for each in answers[::3]] == [text("two"), text("<user>two</><assistant>")]
    assert [len(each.get("logprobs", ())) for each in answers] == [0, 0, 0, 5, 5]


def test_numbers_that_json_does_not_have(
    text_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = LLM.generate

    def planted(*arguments: Any, **options: Any) -> list[RequestOutput]:
        outputs = answers(*arguments, **options)
        outputs[0].outputs[0].logprobs = [{5: float("-inf"), 6: -0.5}]
        outputs[0].prompt_logprobs = [None, {7: float("nan")}]
        return outputs

    monkeypatch.setattr(LLM, "generate", planted)
    assert main(generate(text_model, "--jsonl", "one")) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = json.loads(capfd.readouterr().out, parse_constant=refuse)
    assert (line["logprobs"], line["prompt_logprobs"]) == ([{"5": None, "6": -0.5}], [None, {"7": None}])


def test_stream(text_model: Path, text: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(generate(text_model, "--stream", PROMPT, PROMPT + "more")) == 0
    out, err = capfd.readouterr()
    assert out == f"{text(PROMPT)}\n{text(PROMPT + 'more')}\n"
    assert "hit 0 of 0" in err and f"hit 64 of {len(PROMPT)} computed before" in err


@pytest.mark.parametrize(
    ("arguments", "hit", "losses"),
    [
        (["--no-enable-prefix-caching"], 0, {"not asked for": len(PROMPT)}),
        (["--strict-reuse"], 64, {"granularity": len(PROMPT) - 64}),
        (
            ["--strict-reuse", "--max-num-batched-tokens", "50"],
            0,
            {"granularity": len(PROMPT) - 64, "only near": 64},
        ),
        (["--checkpoint-budget-bytes", "0"], 0, {"granularity": len(PROMPT) - 64, "no capacity": 64}),
    ],
)
def test_options_reach_the_engine(
    text_model: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], hit: int, losses: dict[str, int]
) -> None:
    one_by_one = ("--jsonl", PROMPT, PROMPT + "more", "--max-num-seqs", "1")
    assert main(generate(text_model, *one_by_one, *arguments)) == 0
    second = json.loads(capfd.readouterr().out.splitlines()[1])
    assert (second["cache"]["hit"], second["cache"]["losses"]) == (hit, losses)


def test_request_that_fails(
    text_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(ModelRunner, "launch", fail)
    assert main(generate(text_model, "one")) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "error: RuntimeError: planted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("generate {empty} x", "holds no readable config.json: give the directory"),
        ("generate {empty}/absent x", "holds no readable config.json: give the directory"),
        ("generate {strange} x", "model type 'strange' of "),
        ("generate {model}", "there is no prompt: give some after the model, --prompts FILE, or - for standard input"),
        ("generate {model} --prompts {empty}/absent.txt", "cannot use {empty}/absent.txt: no such file or directory"),
        ("generate {model} --prompts {empty}", "cannot use {empty}: is a directory"),
        ("generate {model} x --max-tokens 0", "max_tokens is 0: set it to 1"),
        ("generate {model} x --max-tokens two", "argument --max-tokens: 'two' is no integer"),
        ("generate {model} x --temperature -1", "temperature is -1.0: set it to"),
        ("generate {model} x --kv-cache-bytes 10", "raise kv_cache_bytes"),
        ("generate {model} x --kv-cache-bytes 900TB", "are free: lower kv_cache_bytes"),
        ("generate {model} x --device tpu", "device is 'tpu': set it to"),
        ("generate {model} x --stream --n 2", "--stream prints one answer a prompt: leave n at 1"),
        ("plan {empty}", "holds no readable config.json"),
        ("plan {model} --checkpoint-budget-bytes -1", "no amount of memory"),
        ("plan {model} --memory 1000", "take a device with more memory"),
        ("plan {model} --memory plenty", "argument --memory: 'plenty' is no amount of memory: give bytes, or such as"),
        ("chat {empty}", "holds no readable config.json"),
        ("chat {demo}", "has no chat template"),
        ("demo --device tpu", "device is 'tpu': set it to"),
    ],
)
def test_errors(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    places = {name: tmp_path / name for name in ("empty", "strange")}
    for name in ("empty", "strange"):
        places[name].mkdir()
    (places["strange"] / "config.json").write_text('{"model_type": "strange"}')
    places |= {"model": text_model, "demo": tmp_path / "demo"}
    shutil.copytree(MODEL, places["demo"], ignore=shutil.ignore_patterns("chat_template.jinja"))
    assert main([each.format(**places) for each in arguments.split()]) == 1
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert not out and last.startswith("mambacache: ") and message.format(**places) in last and "Traceback" not in err


LINES: list[tuple[bytes, str]] = [
    (b'{"prompt": x}', "is no JSON: Expecting value"),
    (b"[5]", "is no JSON object: write"),
    (b"{}", "has no prompt: give one of prompt, prompt_token_ids, messages"),
    (b'{"prompt": "x", "heat": 1}', "has 'heat', which is no sampling parameter: remove it"),
    (b'{"prompt": "x", "max_tokens": "x"}', ": max_tokens is 'x': set it to an integer"),
    (b'{"prompt": 5}', "has a prompt of type int: give a text"),
    (b'{"prompt": "\xff"}', "is no UTF-8 text at character 13: encode it anew"),
    (b'{"prompt": "\\ud800"}', ": the prompt cannot be encoded by the tokenizer"),
    (b'{"prompt": ""}', ": the prompt is empty: give at least one token"),
    (b'{"prompt_token_ids": [5, 999]}', ": the prompt holds token 999, out of the vocabulary"),
    (b'{"prompt": "x", "max_tokens": 1000000}', ": the prompt has 1 tokens and max_tokens is 1000000"),
    (b'{"prompt": "x", "logprobs": 21}', ": logprobs of the prompt is 21 and this engine gives 20 at most"),
    (b'{"messages": [5]}', ": the chat template refuses the messages: "),
]
"""Lines that are no prompts, or that the engine refuses, and what is said of each."""


@pytest.mark.parametrize("place", ["file", "-"])
def test_a_line_that_is_refused_costs_itself(
    text_model: Path,
    tmp_path: Path,
    text: Callable[[str], str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    """Check that the other lines are answered. The object of a bad line names its file and its line."""
    good = json.dumps({"prompt": PROMPT}).encode()
    content = b"\n".join([good, b"", *(line for line, _ in LINES), good, b""])
    (tmp_path / "asked.jsonl").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    source = ["-"] if place == "-" else ["--prompts", str(tmp_path / "asked.jsonl")]
    assert main(generate(text_model, "--jsonl", *source)) == 1
    first, *refused, last = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert first["text"] == last["text"] == text(PROMPT) and first["error"] is last["error"] is None
    assert last["cache"]["hit"] == 64 and last["index"] == len(LINES) + 1
    assert [each["index"] for each in refused] == list(range(1, len(LINES) + 1))
    name = "standard input" if place == "-" else tmp_path / "asked.jsonl"
    for number, (each, (_, said)) in enumerate(zip(refused, LINES, strict=True), 3):
        assert each["error"].startswith(f"line {number} of {name}") and said in each["error"]
        assert each.keys() == first.keys() and each["finish_reason"] == "error" and each["token_ids"] == []


@pytest.mark.parametrize("form", [[], ["--stream"]])
def test_a_prompt_that_is_refused_among_others(
    text_model: Path, tmp_path: Path, text: Callable[[str], str], capfd: pytest.CaptureFixture[str], form: list[str]
) -> None:
    (tmp_path / "asked.txt").write_bytes(b"\xff\ntwo\n")
    assert main(generate(text_model, *form, "", PROMPT, "--prompts", str(tmp_path / "asked.txt"))) == 1
    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if line] == [text(PROMPT), text("two")]
    assert "error: prompt 1: the prompt is empty: give at least one token\n" in err
    assert f"error: line 1 of {tmp_path}/asked.txt is no UTF-8 text at character 1: encode it anew\n" in err


def test_lines_that_are_no_prompts_need_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": x}')
    assert main(["generate", "no/model", "--jsonl", "--prompts", str(tmp_path / "asked.jsonl")]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["error"].startswith(f"line 1 of {tmp_path}/asked.jsonl is no JSON: ")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0")])
def test_no_memory(
    error: Exception, text_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(StatePool, "__init__", fail)
    assert main(generate(text_model, "one")) == 1
    said = str(error).partition(".")[0] or "no more can be had"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"mambacache: there is not enough memory ({said}): `mambacache plan` says what a model takes"


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["plan", "some/model"], "some/model"),
    ],
)
@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"HF_ENDPOINT": "http://127.0.0.1:{port}"},
            "is no directory, and the Hub cannot be reached for it (connection refused): give a directory, or set "
            "HF_HUB_OFFLINE=1 with a cached model",
        ),
        *full(
            ({"HF_HUB_OFFLINE": "1"}, "is not cached, and HF_HUB_OFFLINE keeps it from being fetched: give a directory")
        ),
    ],
)
def test_hub_that_cannot_be_reached(
    environment: dict[str, str], message: str, arguments: list[str], model: str, tmp_path: Path
) -> None:
    with socket.socket() as unheard:  # bound, but nobody listens
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        where = {name: value.format(port=port) for name, value in environment.items()}
        quick = "import time; time.sleep = lambda seconds: None; "  # between its attempts
        command = [*PROCESS[:3], quick + PROCESS[3], *arguments]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            command, env={**inherited, **where, "HF_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120
        )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert last == f"mambacache: {model} {message}"


def test_warnings_are_logged(tmp_path: Path) -> None:
    """A line each, without the source that Python shows."""
    model, asked = tmp_path / "model", tmp_path / "asked"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("tokenizer*", "chat_template.jinja"))
    asked.write_text('{"prompt_token_ids": [5, 6]}')
    done = subprocess.run(
        [*PROCESS, *generate(model, "--prompts", str(asked))], capture_output=True, text=True, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if "tokenizer" in line or "Warning" in line or "LLM(" in line]
    assert (done.returncode, said) == (0, [f"{model} has no tokenizer that can be loaded: give prompts as token ids"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("mambacache 0.")


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    done = subprocess.run([*PROCESS, "plan", tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mambacache: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_reader_that_leaves(text_model: Path) -> None:
    """As `| head` does: no traceback, and nothing said."""
    command = [*PROCESS, *generate(text_model, "--jsonl", *("prompt",) * 40, "--max-tokens", "60")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1 and "Traceback" not in said and "Broken" not in said and "mambacache:" not in said


class Left(io.TextIOBase):
    """Stand in for a stream that is no file and that has lost its reader."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_streams_that_are_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "run", lambda args: print("x") or 0)
    monkeypatch.setattr(sys, "stdout", Left())
    assert main(["plan", "m"]) == 1


def test_reader_of_errors_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `2>&1 | head` does: the sentence cannot be said."""
    monkeypatch.setattr(sys, "stderr", Left())
    assert main(["grow"]) == 1


def test_ctrl_c(text_model: Path) -> None:
    command = [*PROCESS, *generate(text_model, "--stream", PROMPT, "--max-tokens", "7000", "--ignore-eos")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)  # it answers
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        process.stdout.read()
    assert process.returncode == 130 and b"Traceback" not in said
