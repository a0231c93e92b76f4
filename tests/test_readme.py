"""Every code block of README.md runs, and its tables say what the code computes."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mambacache.kernels import state_bytes
from mambacache.models.adapt import MODEL_TYPES, adapt
from mambacache.models.attention import ATTENTION
from mambacache.report import Loss
from mambacache.runner.kv_pages import kv_block_bytes
from mambacache.runner.sizing import weight_bytes

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
CHECKPOINTS = json.loads((ROOT / "tests" / "checkpoint_configs.json").read_text())
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]


def test_there_is_no_other_kind_of_block() -> None:
    assert {kind for kind, _ in BLOCKS} == {"text", "bash", "python"}


@pytest.mark.parametrize("block", [block for kind, block in BLOCKS if kind == "python"])
def test_python_block(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), {})
    assert "Lima ." in printed.getvalue() or "num_tokens=128" in printed.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    """`make demo` and `make test` run elsewhere (test_recall, and whoever runs this): here their targets must exist."""
    words = shlex.split(command)
    if words[0] == "make":
        words.insert(1, "--dry-run")
    elif words[0] == "pip":
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(tmp_path)]
        words = [sys.executable, "-m", *words, *options]
    else:
        words[0] = str(Path(sys.executable).with_name(words[0]))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout or words[0] == sys.executable


def test_demo_output_is_of_the_demo_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "recall"))
    from demo import expected_hits

    rows = [list(map(int, row)) for row in re.findall(r"prompt +(\d+)  hit +(\d+)  ceiling +(\d+)", README)]
    assert [hit for _, hit, _ in rows] == expected_hits() + [0] * 20
    assert all(hit <= ceiling < prompt for prompt, hit, ceiling in rows)


def test_gpu_times_are_those_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from table import host_table, table

    figures = json.loads((ROOT / "benchmarks" / "results" / "kernels-h200.json").read_text())
    assert table(figures) in README and host_table(figures) in README
    assert f"commit {figures['commit'][:7]}" in README
    compared = [row for row in figures["rows"] if row.get("peer_error")]
    assert compared and all(row["ours_error"] <= 1.2 * row["peer_error"] for row in compared)


def test_all_model_types_and_losses_are_listed() -> None:
    assert all(f"`{name}`" in README for name in MODEL_TYPES)
    assert set(re.findall(r"^\| `([a-z ]+)` \|.*\|.*\|$", README, re.MULTILINE)) >= set(Loss)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_sizes(name: str) -> None:
    config = AutoConfig.for_model(**CHECKPOINTS[name])
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    model = adapt(module)
    sizes = [weight_bytes(model), state_bytes(model.state_layers(torch.float32))]
    if model.kv_layers:
        sizes.append(kv_block_bytes(model.kv_layers, 64) // 64)
    row = next(line for line in README.splitlines() if line.startswith(f"| {name} |"))
    assert [int(n.replace(",", "")) for n in re.findall(r"([\d,]{5,}) bytes", row)] == sizes


def test_vllm_times_are_those_of_the_benchmark() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "vllm-h200.json").read_text())["runs"][0]
    rows = {(row["workload"], row["engine"]): row for row in figures["rows"]}
    assert f"commit {figures['commit'][:7]}" in README
    for workload in {workload for workload, _ in rows}:
        plugin, vllm = rows[workload, "plugin"], rows[workload, "vllm"]
        ratio = plugin["seconds"] / vllm["seconds"]
        line = f"| {workload} | {plugin['seconds']:.3f} | {vllm['seconds']:.3f} | {ratio:.2f} "
        assert f"{line}| {plugin['hit_tokens']:,} | {vllm['hit_tokens']:,} |" in README


def test_vllm_errors_are_those_of_the_benchmark() -> None:
    models = json.loads((ROOT / "benchmarks" / "results" / "vllm-accuracy-h200.json").read_text())["models"]
    for model in models.values():
        plugin, vllm = model["rms"]["plugin"], model["rms"]["vllm"]
        assert plugin <= 1.2 * vllm
        assert f"| {plugin:.4f} | {vllm:.4f} | {plugin / vllm:.2f} |" in README
