"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mambacache import LLM, SamplingParams
from mambacache.cli import main
from mambacache.runner.model_runner import ModelRunner

PROMPT = "A prompt of more than sixty-four bytes, so that it ends behind a boundary. "
SMALL = (
    "--device",
    "cpu",
    "--kv-cache-bytes",
    "4000000",
    "--checkpoint-budget-bytes",
    "1000000",
    "--max-num-seqs",
    "4",
)


@pytest.fixture
def text(text_model: Path) -> Callable[[str], str]:
    """What the model answers with 5 tokens."""
    llm = LLM(text_model, device="cpu", kv_cache_bytes=4_000_000, checkpoint_budget_bytes=0, max_num_seqs=4)
    return lambda prompt: llm.generate(prompt, SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text


def generate(model: Path, *arguments: str) -> list[str]:
    return ["generate", "--model", str(model), "--max-tokens", "5", *SMALL, *arguments]


def test_generate(text_model: Path, text: Callable[[str], str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(generate(text_model, "--prompt", PROMPT, "--prompt", "two")) == 0
    out, err = capfd.readouterr()
    assert out == f"{text(PROMPT)}\n{text('two')}\n"
    assert f"prompt {len(PROMPT)}, hit 0 of 0 computed before (lost: none), first token after " in err


def test_prompts_from_a_file(text_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = [PROMPT, PROMPT + "more", "ü"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")
    assert main(generate(text_model, "--json", "--prompts", str(tmp_path / "prompts.txt"))) == 0
    out, err = capfd.readouterr()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [each["cache"]["prompt"] for each in answers] == [len(prompt.encode()) for prompt in prompts]
    assert [each["cache"]["hit"] for each in answers] == [0, 64, 0]
    for each in answers:
        assert sum(each["cache"]["losses"].values()) == each["cache"]["ceiling"] - each["cache"]["hit"]
        assert (each["finish_reason"], each["error"], len(each["token_ids"])) == ("length", None, 5)
        assert each["time_to_first_token"] > 0
    assert "prompts: 100%" in err and "3/3" in err
    assert f"hit 64 of {len(PROMPT)} computed before (lost: {len(PROMPT) - 64} granularity)" in err


@pytest.mark.parametrize(
    ("arguments", "hit", "losses"),
    [
        (["--no-prefix-caching"], 0, {"not asked for": len(PROMPT)}),
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
    one_by_one = ("--json", "--prompt", PROMPT, "--prompt", PROMPT + "more", "--max-num-seqs", "1")
    assert main(generate(text_model, *one_by_one, *arguments)) == 0
    second = json.loads(capfd.readouterr().out.splitlines()[1])
    assert (second["cache"]["hit"], second["cache"]["losses"]) == (hit, losses)


def test_request_that_fails(
    text_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(ModelRunner, "execute", fail)
    assert main(generate(text_model, "--prompt", "one")) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "error: RuntimeError: planted"


def table(out: str) -> dict[str, str]:
    """The lines that `plan` prints, by their first column."""
    return {line[:26].strip(): line[26:] for line in out.splitlines() if line[:26].strip()}


def numbers(text: str) -> list[int]:
    return [int(word.replace(",", "")) for word in text.split() if word.replace(",", "").isdigit()]


@pytest.fixture
def config_only(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    """A checkpoint's config.json and nothing else."""
    (tmp_path / "config.json").write_text((tiny_model("qwen3_next") / "config.json").read_text())
    return tmp_path


# Each recurrent layer has a conv window of 3 rows of 192 channels, and 4 heads of 32 x 16; attention has 2 heads of
# 32 + 32.
WINDOW, MATRIX, PAGE = 3 * 192 * 4, 4 * 32 * 16 * 4, 64 * 2 * 64 * 4
STATE = 3 * (WINDOW + MATRIX)


@pytest.mark.parametrize(
    ("arguments", "state", "page"),
    [
        ((), STATE, PAGE),
        (("--state-dtype", "bfloat16"), STATE - 3 * MATRIX // 2, PAGE),
        (("--max-draft-tokens", "2"), STATE + 3 * 2 * 192 * 4, PAGE),
        (("--dtype", "bfloat16"), STATE - 3 * 1024, PAGE // 2),  # windows of 1,152 bytes begin at multiples of 256
    ],
)
def test_plan(
    config_only: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], state: int, page: int
) -> None:
    seqs = ("--max-num-seqs", "2", "--checkpoint-budget-bytes", "1000000", "--kv-cache-bytes", "500000")
    assert main(["plan", str(config_only), "--device", "cpu", *seqs, *arguments]) == 0
    rows = table(capsys.readouterr().out)
    assert numbers(rows["one state"])[0] == state and numbers(rows["one KV block"])[0] == page
    assert numbers(rows["one state equals"]) == [state * 64 // page]
    drafts = "--max-draft-tokens" in arguments
    assert numbers(rows["running states"]) == [2 * (5 if drafts else 1) + 2, 2]
    assert numbers(rows["cached states"]) == [1_000_000 // state, 1_000_000 // state * state]
    assert numbers(rows["KV blocks"]) == [500_000 // page, 500_000 // page * 64]
    assert numbers(rows["longest request"]) == [16384] and numbers(rows["shortest hit"]) == [64, 65]
    assert numbers(rows["max_num_seqs + 1"]) == [(5 if drafts else 1) * state]


def test_plan_for_a_device_that_is_not_here(
    config_only: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = 80 << 30
    assert main(["plan", str(config_only), "--device", "cuda", "--memory-bytes", str(memory)]) == 0
    rows = table(capsys.readouterr().out)
    taken = numbers(rows["cached states"])[1] + numbers(rows["running states"])[0] * numbers(rows["one state"])[0]
    assert taken + numbers(rows["KV blocks"])[0] * numbers(rows["one KV block"])[0] < 0.85 * memory
    assert main(["plan", str(config_only), "--device", "cuda"]) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err


def test_plan_agrees_with_the_engine(text_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(text_model), *SMALL]) == 0
    rows = table(capsys.readouterr().out)
    llm = LLM(text_model, device="cpu", kv_cache_bytes=4_000_000, checkpoint_budget_bytes=1_000_000, max_num_seqs=4)
    states, pages = llm.runner.states, [page for layer in llm.runner.pages for page in layer]
    assert numbers(rows["one state"])[0] == states.block_bytes
    assert numbers(rows["running states"])[0] + numbers(rows["cached states"])[0] == states.num_blocks
    assert numbers(rows["one KV block"])[0] == sum(page[0].nbytes for page in pages)
    assert numbers(rows["KV blocks"])[0] == len(pages[0]) - 1
    assert numbers(rows["weights"])[0] == sum(x.nbytes for x in llm.runner.model.module.parameters()) + sum(
        x.nbytes for x in llm.runner.model.module.buffers()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "{empty}", "--prompt", "x"], "holds no readable config.json"),
        (["generate", "--model", "{model}"], "there is no prompt: give --prompt TEXT or --prompts FILE"),
        (["generate", "--model", "{model}", "--prompts", "{empty}/absent.txt"], "No such file"),
        (["generate", "--model", "{model}", "--prompt", ""], "prompt 0 is empty: give"),
        (["generate", "--model", "{model}", "--prompt", "x", "--max-tokens", "0"], "max_tokens is 0: set it to 1"),
        (["generate", "--model", "{model}", "--prompt", "x", "--temperature", "-1"], "temperature is -1.0: set it to"),
        (["generate", "--model", "{model}", "--prompt", "x", "--kv-cache-bytes", "10"], "raise kv_cache_bytes"),
        (["generate", "--model", "{model}", "--prompt", "x", "--device", "tpu"], "device is 'tpu': set it to"),
        (["plan", "{empty}"], "holds no readable config.json"),
        (["plan", "{model}", "--checkpoint-budget-bytes", "-1"], "checkpoint_budget_bytes is -1: set it to 0"),
        (["plan", "{model}", "--memory-bytes", "1000"], "free memory"),
    ],
)
def test_errors(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([each.format(empty=tmp_path, model=text_model) for each in arguments]) == 1
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert not out and last.startswith("mambacache: ") and message in last and "Traceback" not in err


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    program = "import sys; from mambacache.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-P", "-c", program, "plan", tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mambacache: ") and len(done.stderr.splitlines()) == 1
