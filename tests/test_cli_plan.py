"""`mambacache plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mambacache import LLM
from mambacache.cli import main
from mambacache.engine import parts
from mambacache.models.adapt import Model, model_skeleton
from mambacache.runner import sizing
from tiny_models import save_tiny_model

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
    assert main(["plan", str(config_only), "--device", "cuda", "--memory", "80GB"]) == 0
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
    """What they leave has to hold a request; what remains is shared out, a quarter of it on a CPU."""
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


@pytest.mark.parametrize(("share", "drafts"), [(None, False), (0.2, False), (0.5, False), (0.9, False), (0.5, True)])
def test_plan_and_engine_mean_the_same_share(
    tmp_path: Path,
    text_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
    drafts: bool,
) -> None:
    """Of all memory, less the weights and a draft model, and at most what is free."""
    small = str(save_tiny_model("mamba2", tmp_path, vocab_size=257)) if drafts else None
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
    sizes = LLM(text_model, device="cpu", gpu_memory_utilization=share, max_num_seqs=4, speculative=small).sizes
    weights = sum(loaded)
    loaded.clear()  # plan comes before any weights are there
    flags = [] if share is None else ["--gpu-memory-utilization", str(share)]
    flags += [f"--speculative={small}"] if drafts else []
    assert main(["plan", str(text_model), "--device=cpu", "--max-num-seqs=4", *flags]) == 0
    rows = table(capsys.readouterr().out)
    assert numbers(rows["memory"]) == [min(int(total * (share or 1)), free)]
    beside = sum(numbers(rows["draft model"])[1:]) if drafts else 0
    assert numbers(rows["weights"])[0] == weights + beside and bool(beside) == drafts
    assert numbers(rows["cached states"])[0] == sizes.max_checkpoints
    assert numbers(rows["KV blocks"])[0] == sizes.num_kv_blocks


def test_a_draft_model_that_is_none(config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config_only), *SMALL, "--speculative=no/such/one", "--max-draft-tokens=2"]) == 1
    assert "speculative is 'no/such/one': " in capsys.readouterr().err


def test_a_length_beyond_the_model(config_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config_only), *SMALL, "--max-model-len", "20000"]) == 1
    assert "takes 16384 tokens: set it to 16384 or less" in capsys.readouterr().err


def test_weights_of_a_quantised_checkpoint_are_those_of_its_files(
    config_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there are none, an unquantised model's, and it says so."""
    config = json.loads((config_only / "config.json").read_text())
    (config_only / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    whole = sizing.weight_bytes(model_skeleton(config_only))
    assert main(["plan", str(config_only), *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{config_only} is quantised") and numbers(table(out)["weights"])[0] == whole
    for number in range(2):
        (config_only / f"{number}.safetensors").write_bytes(bytes(3000))
    assert main(["plan", str(config_only), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "is quantised" not in out and numbers(table(out)["weights"])[0] == 6000


@pytest.mark.parametrize("nothing", ["--checkpoint-budget-bytes=0", "--no-enable-prefix-caching"])
def test_without_cached_states_no_hit_is_described(
    config_only: Path, capsys: pytest.CaptureFixture[str], nothing: str
) -> None:
    of_hits = {"shortest hit", "a prompt", "checkpoint_interval 1024"}
    for options, shown in (([], of_hits), ([nothing], set())):
        assert main(["plan", str(config_only), "--device=cpu", "--memory=1GB", *options]) == 0
        assert of_hits & table(capsys.readouterr().out).keys() == shown
