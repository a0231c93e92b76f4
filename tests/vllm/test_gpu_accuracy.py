"""Logits of models with real layer shapes on a GPU, with the plugin and without: `make test-vllm-gpu`.

With MAMBACACHE_RESULTS=FOLDER each model leaves its figures there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from logits_run import DECODED, MANY_PROMPTS, PROMPTS, sequences
from real_shapes import DEEP, SHAPES, save
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).resolve().parent
RATIO = 1.2
SECONDS = 250
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def logits(model: Path, engine: str, out: Path, **options: Any) -> dict[str, Any]:
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
    tokens = [count + DECODED - 1 for count in options.get("prompts", PROMPTS)]  # the last of an answer is not run
    assert len(seen) == sum(tokens), "not every position was seen"
    return found


def note(name: str, figures: dict[str, object]) -> None:
    print(name, figures)
    if folder := os.environ.get("MAMBACACHE_RESULTS"):
        (Path(folder) / f"{name}.json").write_text(json.dumps(figures))


@torch.inference_mode()
def exact(model: Path, prompts: Sequence[int] = PROMPTS) -> torch.Tensor:
    """Logits [requests, positions, vocabulary] of an fp32 forward."""
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to("cuda").eval()
    found = torch.stack([original(own[None].cuda(), use_cache=False).logits[0].cpu() for own in sequences(prompts)])
    del original
    torch.cuda.empty_cache()
    return found


def error(found: dict[str, Any], reference: torch.Tensor) -> float:
    """The root of the mean square over all positions of both rounds."""
    difference = found["logits"] - reference[found["places"][:, 0], found["places"][:, 1]]
    return difference.pow(2).mean().sqrt().item()


@pytest.mark.parametrize("name", SHAPES)
def test_errors_against_fp32_are_those_of_vllm(name: str, tmp_path: Path) -> None:
    served = save(name, tmp_path / "model", "cuda")
    reference, errors = exact(tmp_path / "model"), {}
    for engine in ("plugin", "vllm"):
        found = logits(served, engine, tmp_path / f"{engine}.pt")
        errors[engine] = error(found, reference)
        if engine == "plugin":
            assert found["hits"] == [[0, 0, 0, 0], [640, 256, 64, 0]]
    note(name, {"rms": errors, "scale": reference.std().item()})
    assert errors["plugin"] <= RATIO * errors["vllm"]


@pytest.mark.parametrize(
    ("name", "prompts"),
    [(name, PROMPTS) for name in SHAPES] + [(name, MANY_PROMPTS) for name in ("kimi_linear", *DEEP)],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} prompts",
)
def test_errors_of_fp8_are_those_of_vllm(name: str, prompts: Sequence[int], tmp_path: Path) -> None:
    """With the mean KL from plain vLLM's logits noted, beside that of plain vLLM in another batch order."""
    served = save(name, tmp_path / "model", "cuda")
    reference, errors, dense = exact(tmp_path / "model", prompts), {}, {}
    for run, backwards in {"plugin": False, "vllm": False, "vllm, backwards": True}.items():
        options = {"quantization": "fp8", "backwards": backwards, "prompts": prompts}
        found = logits(served, run.split(",")[0], tmp_path / f"{run}.pt", **options)
        errors[run] = error(found, reference)
        dense[run] = torch.full((2, *sequences(prompts).shape, found["logits"].shape[-1]), torch.nan)
        rounds = (torch.arange(len(found["logits"])) >= found["first_round"]).long()
        dense[run][rounds, found["places"][:, 0], found["places"][:, 1]] = found["logits"].log_softmax(-1)
    alone = dense.pop("vllm")
    kl = {run: (alone.exp() * (alone - other)).sum(-1).nanmean().item() for run, other in dense.items()}
    note(f"fp8-{name}-{len(prompts)}", {"rms": errors, "kl": kl})
    assert errors["plugin"] <= RATIO * errors["vllm"]
