"""Check the output of `mambacache plan` and the arguments that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from mambacache import LLM
from mambacache.cli import main
from mambacache.engine import parts
from mambacache.models.adapt import Model, model_skeleton
from mambacache.runner import sizing

SMALL = ["--device=cpu", "--kv-cache-bytes=4MB", "--checkpoint-budget-bytes=1000000", "--max-num-seqs=4"]


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
        (("--max-draft-tokens", "2"), STATE, PAGE),
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
    assert numbers(rows["running states"]) == [2 + 2, 2]
    assert numbers(rows["cached states"]) == [1_000_000 // state, 1_000_000 // state * state]
    assert numbers(rows["KV blocks"]) == [500_000 // page, 500_000 // page * 64]
    assert rows["shared by both"].strip() == "nothing: each has memory of its own"
    assert numbers(rows["longest request"]) == [16384] and numbers(rows["shortest hit"]) == [64, 65]
    log = numbers(rows["one token log"])[0]
    assert log > 3 * 16 * 192 * (2 if "--dtype" in arguments else 4), "it holds more than the convolution's inputs"
    assert numbers(rows["max_num_seqs + 1"]) == [state + log]


def test_plan_for_a_device_that_is_not_here(
    config_only: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = 80 * 10**9
    assert main(["plan", str(config_only), "--device", "cuda", "--dtype", "auto", "--memory", "80GB"]) == 0
    rows = table(capsys.readouterr().out)
    slabs, size = numbers(rows["shared by both"])[:2]
    assert "at most" in rows["cached states"] and "rounding loses" in rows["shared by both"]
    logs = numbers(rows["running states"])[1] * numbers(rows["one token log"])[0]
    assert numbers(rows["states and KV"])[0] == slabs * size + logs < 0.85 * memory
    assert rows["states and KV"].endswith("85% of what is left: the rest is for activations and CUDA graphs")
    assert main(["plan", str(config_only), "--device", "cuda"]) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err


def test_plan_agrees_with_the_engine(text_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(text_model), *SMALL]) == 0
    rows = table(capsys.readouterr().out)
    budgets = {"kv_cache_bytes": 4_000_000, "checkpoint_budget_bytes": 1_000_000}
    llm = LLM(text_model, device="cpu", max_num_seqs=4, **budgets)
    states, pages = llm.runner.states, llm.runner.pages
    assert pages is not None
    assert numbers(rows["one state"])[0] == states.block_bytes
    assert numbers(rows["one token log"])[0] == llm.runner.logs.block_bytes and llm.runner.logs.num_blocks == 4
    assert numbers(rows["running states"])[0] + numbers(rows["cached states"])[0] == states.num_blocks
    assert numbers(rows["one KV block"])[0] == pages.block_bytes
    assert numbers(rows["KV blocks"])[0] == pages.num_blocks
    assert numbers(rows["weights"])[0] == sum(x.nbytes for x in llm.runner.model.module.parameters()) + sum(
        x.nbytes for x in llm.runner.model.module.buffers()
    )


def test_weights_are_subtracted(config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the memory beside the weights has to hold a request. States and KV get at most a quarter of it on a
    CPU."""
    assert main(["plan", str(config_only), "--device", "cpu", "--memory", "1GB"]) == 0
    rows = table(capsys.readouterr().out)
    weights, left = numbers(rows["weights"].replace(",", "").replace("bytes", ""))
    assert numbers(rows["memory"]) == [10**9] and weights + left == 10**9
    assert left * 0.2 < numbers(rows["states and KV"])[0] <= left * 0.25
    assert "at most 25% of what is left: a CPU's memory is shared" in rows["states and KV"]
    assert main(["plan", str(config_only), "--device", "cpu", "--memory", str(weights + 1000)]) == 1
    assert "one request takes" in capsys.readouterr().err
    assert main(["plan", str(config_only), "--device", "cpu", "--memory", str(weights)]) == 1
    assert f"the weights take {weights:,} bytes and {weights:,} are there: take" in capsys.readouterr().err


def test_a_share_of_the_memory(config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config_only), *SMALL, "--memory", "1GB", "--gpu-memory-utilization", "0.5"]) == 0
    assert numbers(table(capsys.readouterr().out)["memory"]) == [500_000_000]
    assert main(["plan", str(config_only), *SMALL, "--memory", "1GB", "--gpu-memory-utilization", "1e-6"]) == 1
    assert "gpu_memory_utilization is 1e-06, which makes 1,000 bytes, and the weights" in capsys.readouterr().err


@pytest.mark.parametrize("share", [None, 0.2, 0.5, 0.9])
def test_plan_and_engine_mean_the_same_share(
    text_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, share: float | None
) -> None:
    """The engine's memory is a share of all memory, and at most the free memory; its weights come out of it."""
    total, free = 100 << 20, 60 << 20
    monkeypatch.setattr("os.sysconf", lambda name: total // 4096 if name == "SC_PHYS_PAGES" else 4096)
    loaded: list[int] = []
    load = parts.load_model

    def loading(*arguments: Any) -> Model:
        model = load(*arguments)
        loaded.append(sizing.weight_bytes(model))
        return model

    monkeypatch.setattr(parts, "load_model", loading)
    for module in (parts, sizing):
        monkeypatch.setattr(module, "free_memory", lambda device: free - sum(loaded))
    sizes = LLM(text_model, device="cpu", gpu_memory_utilization=share, max_num_seqs=4).sizes
    weights = sum(loaded)
    loaded.clear()  # plan comes before any weights are there
    flags = [] if share is None else ["--gpu-memory-utilization", str(share)]
    assert main(["plan", str(text_model), "--device=cpu", "--max-num-seqs=4", *flags]) == 0
    rows = table(capsys.readouterr().out)
    assert numbers(rows["memory"]) == [min(int(total * (share or 1)), free)]
    assert numbers(rows["weights"])[0] == weights
    assert numbers(rows["cached states"])[0] == sizes.max_checkpoints
    assert numbers(rows["KV blocks"])[0] == sizes.num_kv_blocks


def test_a_length_beyond_the_model(config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config_only), *SMALL, "--max-model-len", "20000"]) == 1
    assert "takes 16384 tokens: set it to 16384 or less" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--memory 80GB", "a GPU with 80,000,000,000 bytes, weights in bfloat16"),
        ("--memory 80GB --device auto", "a GPU with 80,000,000,000 bytes, weights in bfloat16"),
        ("--memory 80GB --device cuda", "a GPU with 80,000,000,000 bytes, weights in bfloat16"),
        ("--memory 80GB --dtype auto", "a GPU with 80,000,000,000 bytes, weights in float32"),
        ("--memory 80GB --device cpu", "a CPU with 80,000,000,000 bytes, weights in float32"),
        ("", "this machine's CPU, weights in float32"),
        ("--dtype bfloat16", "this machine's CPU, weights in bfloat16"),
    ],
)
def test_the_first_line_says_the_device_that_is_planned_for(
    config_only: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, line: str
) -> None:
    """Check that `--memory` means a GPU, with weights in bfloat16, unless the user says otherwise."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", str(config_only), *arguments.split()]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"{'planned for':<28}{line} (--device, --memory and --dtype change that)"
    rows = table("\n".join(rest))
    half = "bfloat16" in line
    assert numbers(rows["one state"])[0] == (STATE - 3 * 1024 if half else STATE)
    assert numbers(rows["one KV block"])[0] == (PAGE // 2 if half else PAGE)
    assert ("85%" if "GPU" in line else "25%") in rows["states and KV"]


def test_weights_of_a_quantised_checkpoint_are_those_of_its_files(
    config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that files give the size. Without files, FP8 weights are counted, and other methods get a line that says
    so."""
    config = json.loads((config_only / "config.json").read_text())
    for method in ("awq", "fp8"):
        quantised = config | {"quantization_config": {"quant_method": method}}
        (config_only / "config.json").write_text(json.dumps(quantised))
        model = model_skeleton(config_only)
        expected = sizing.weight_bytes(model) if method == "awq" else sizing.fp8_weight_bytes(model)
        assert main(["plan", str(config_only), *SMALL]) == 0
        out = capsys.readouterr().out
        assert numbers(table(out)["weights"])[0] == expected
        assert (f"{config_only} is quantised and its files are not here" in out.splitlines()[1]) == (method == "awq")
    for number in range(2):
        (config_only / f"{number}.safetensors").write_bytes(bytes(3000))
    assert main(["plan", str(config_only), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "is quantised" not in out and numbers(table(out)["weights"])[0] == 6000


# --- vLLM with the plugin ---

CHECKPOINTS = json.loads((Path(__file__).parent / "checkpoint_configs.json").read_text())


def plan_plugin(checkpoint: str, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, str]:
    (folder / "config.json").write_text(json.dumps(CHECKPOINTS[checkpoint]))
    assert main(["plan", str(folder), *flags]) == 0
    return table(capsys.readouterr().out)


# Of one layer, as vLLM cuts it: rows and channels of the window, elements of the matrices; and numbers of KV a token.
# Groups that are fewer than GPUs are on each of them, and so is one KV head; latent attention keeps 512 + 64 on all.
SHARDS = [
    ("Qwen3-Next-80B-A3B", 1, 36, 3, 2 * 16 * 128 + 32 * 128, 32 * 128 * 128, 12 * 2 * 2 * 256),
    ("Qwen3-Next-80B-A3B", 4, 36, 3, 4 * 2 * 128 + 8 * 128, 8 * 128 * 128, 12 * 1 * 2 * 256),
    ("Granite-4.0-H-Small", 2, 36, 3, 64 * 64 + 2 * 128, 64 * 64 * 128, 4 * 4 * 2 * 128),
    ("Falcon-Mamba-7B", 2, 64, 3, 4096, 4096 * 16, 0),
    ("LFM2-700M", 2, 10, 2, 768, 0, 6 * 4 * 2 * 64),
    ("Kimi-Linear-48B-A3B", 2, 20, 3, 3 * 16 * 128, 16 * 128 * 128, 7 * 576),
]


@pytest.mark.parametrize(("name", "gpus", "layers", "rows", "channels", "matrix", "kv"), SHARDS)
def test_plan_for_several_gpus(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    gpus: int,
    layers: int,
    rows: int,
    channels: int,
    matrix: int,
    kv: int,
) -> None:
    said = plan_plugin(name, tmp_path, capsys, "--memory=400GB", f"--tensor-parallel-size={gpus}", "--state-bytes=8GB")
    state = layers * (rows * channels * 2 + matrix * 4)
    assert numbers(said["one state"])[0] == state
    assert f"on {gpus} GPUs with" in said["planned for"] or gpus == 1
    assert numbers(said["state_bytes"]) == [8 * 10**9] and "gpu_memory_utilization 0.92" in said["memory"]
    log, [states], running = (numbers(said[key]) for key in ("one token log", "states", "requests at a time"))
    taken = (states + 1) * state + (running[0] + 1) * log[0]
    assert 8 * 10**9 - 2 * (state + log[0]) < taken <= 8 * 10**9 and running[0] <= states
    left = numbers(said["weights"].replace(",", ""))
    blocks = [] if not kv else [(left[1] - taken) // (64 * kv * 2)]
    assert numbers(said["KV blocks"])[:1] == blocks


def test_states_take_half_of_what_weights_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the plugin where state_bytes is not set."""
    flags = ("--memory=160GB", "--tensor-parallel-size=4", "--gpu-memory-utilization=0.5", "--max-num-seqs=7")
    rows = plan_plugin("Qwen3-Next-80B-A3B", tmp_path, capsys, *flags)
    weights = sizing.weight_bytes(model_skeleton(tmp_path, "bfloat16", "cuda")) // 4
    assert numbers(rows["weights"].replace(",", "")) == [weights, 80 * 10**9 - weights]
    assert numbers(rows["state_bytes"].replace(",", ""))[0] == (80 * 10**9 - weights) // 2
    assert numbers(rows["requests at a time"])[0] == 7


@pytest.mark.parametrize("name", ["Qwen3-Next-80B-A3B", "Kimi-Linear-48B-A3B", "Granite-4.0-H-Tiny"])
def test_weights_in_fp8_are_those_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    rows = plan_plugin(name, tmp_path, capsys, "--memory=141GB", "--quantization=fp8")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CHECKPOINTS[name]), dtype=torch.bfloat16)
        fp8 = replace_with_fp8_linear(whole, ["lm_head"], FineGrainedFP8Config())
    expected = sum(x.numel() * x.element_size() for x in (*fp8.parameters(), *fp8.buffers()))
    assert numbers(rows["weights"])[0] == pytest.approx(expected, rel=1e-3)
    assert rows["planned for"].endswith("weights in fp8")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-parallel-size=3", "tensor_parallel_size is 3 and a recurrent layer has 2 key heads: set it to a"),
        ("--tensor-parallel-size=0", "tensor_parallel_size is 0: set it to 1 or more"),
        ("--state-bytes=2GB", "on each GPU the weights take "),
        ("--state-bytes=1000", "raise state_bytes"),
        ("--state-bytes=1MB --device=cpu", "the plugin is planned for GPUs: leave out --device"),
    ],
)
def test_plans_of_the_plugin_that_are_refused(
    config_only: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert main(["plan", str(config_only), "--memory=2GB", *flags.split()]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("nothing", ["--checkpoint-budget-bytes=0", "--no-enable-prefix-caching"])
def test_without_cached_states_no_hit_is_described(
    config_only: Path, capsys: pytest.CaptureFixture[str], nothing: str
) -> None:
    of_hits = {"shortest hit", "a prompt", "checkpoint_interval 1024"}
    for options, shown in (([], of_hits), ([nothing], set())):
        assert main(["plan", str(config_only), "--device=cpu", "--memory=1GB", *options]) == 0
        assert of_hits & table(capsys.readouterr().out).keys() == shown
