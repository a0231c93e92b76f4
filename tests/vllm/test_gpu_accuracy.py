"""Logits of models with real layer shapes on a GPU, with the plugin and without: `make test-vllm-gpu`.

With MAMBACACHE_RESULTS=FOLDER each model leaves its figures there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_run import DECODED, PROMPTS, sequences
from real_shapes import SHAPES, save
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).resolve().parent
RATIO = 1.2
LENGTHS = [count + DECODED - 1 for count in PROMPTS]  # the last token of an answer is not run
SECONDS = 250
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def logits(model: Path, engine: str, out: Path, **options: object) -> dict[str, Any]:
    """Logits [positions, vocabulary] and whose they are, [positions, 2], with the hits of both rounds."""
    paths = os.pathsep.join([str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", FOLDER / "logits_run.py", model, out, json.dumps(options)],
        env={**os.environ, "MAMBACACHE": "1" if engine == "plugin" else "0", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = torch.load(out)
    seen = {tuple(place) for place in found["places"].tolist()}
    assert len(seen) == sum(LENGTHS), "not every position was seen"
    return found


def note(name: str, figures: dict[str, object]) -> None:
    print(name, figures)
    if folder := os.environ.get("MAMBACACHE_RESULTS"):
        (Path(folder) / f"{name}.json").write_text(json.dumps(figures))


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_errors_against_fp32_are_those_of_vllm(name: str, tmp_path: Path) -> None:
    served = save(name, tmp_path / "model", "cuda")
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).to("cuda").eval()
    reference = torch.stack([original(own[None].cuda(), use_cache=False).logits[0].cpu() for own in sequences()])
    del original
    torch.cuda.empty_cache()
    errors = {}
    for engine in ("plugin", "vllm"):
        found = logits(served, engine, tmp_path / f"{engine}.pt")
        exact = reference[found["places"][:, 0], found["places"][:, 1]]
        errors[engine] = (found["logits"] - exact).pow(2).mean().sqrt().item()
        if engine == "plugin":
            assert found["hits"] == [[0, 0, 0, 0], [640, 256, 64, 0]]
    note(name, {"rms": errors, "scale": reference.std().item()})
    assert errors["plugin"] <= RATIO * errors["vllm"]


@pytest.mark.parametrize("name", ["lfm2_moe", "jamba", "granitemoehybrid"])
def test_fp8_differs_from_vllm_as_vllm_from_itself(name: str, tmp_path: Path) -> None:
    """Mean KL of what plain vLLM says, over all positions of both rounds that both run."""
    served = save(name, tmp_path / "model", "cuda")
    torch.cuda.empty_cache()
    dense = {}
    for run, backwards in {"plugin": False, "vllm": False, "vllm, backwards": True}.items():
        found = logits(served, run.split(",")[0], tmp_path / f"{run}.pt", quantization="fp8", backwards=backwards)
        dense[run] = torch.full((2, *sequences().shape, found["logits"].shape[-1]), torch.nan)
        rounds = (torch.arange(len(found["logits"])) >= found["first_round"]).long()
        dense[run][rounds, found["places"][:, 0], found["places"][:, 1]] = found["logits"].log_softmax(-1)
    alone = dense.pop("vllm")
    each = {run: (alone.exp() * (alone - other)).sum(-1) for run, other in dense.items()}
    figures = {run: [rows.nanmean().item(), *rows.flatten(1).nanmean(1).tolist()] for run, rows in each.items()}
    note(f"fp8-{name}", {"kl, all, cold, hit": figures})
    assert figures["plugin"][0] <= RATIO * figures["vllm, backwards"][0]
