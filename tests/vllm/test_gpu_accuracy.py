"""Logits of models with real layer shapes on a GPU, with the plugin and without: `make test-vllm-gpu`.

With MAMBACACHE_RESULTS=FOLDER each model leaves its figures there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def logits(
    model: Path, engine: str, out: Path, **options: object
) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """[positions, vocabulary] and whose they are, [positions, 2], with the hits of both rounds."""
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
    return found["logits"], found["places"], found["hits"]


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
        got, places, hits = logits(served, engine, tmp_path / f"{engine}.pt")
        errors[engine] = (got - reference[places[:, 0], places[:, 1]]).pow(2).mean().sqrt().item()
        if engine == "plugin":
            assert hits == [[0, 0, 0, 0], [640, 256, 64, 0]]
    note(name, {"rms": errors, "scale": reference.std().item()})
    assert errors["plugin"] <= RATIO * errors["vllm"]


def mean_kl(a: torch.Tensor, b: torch.Tensor) -> float:
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def test_fp8_differs_from_vllm_as_vllm_from_itself(tmp_path: Path) -> None:
    served = save("qwen3_next", tmp_path / "model", "cuda")
    torch.cuda.empty_cache()
    dense = {}
    for run, backwards in {"plugin": False, "vllm": False, "vllm, backwards": True}.items():
        got, places, _ = logits(
            served, run.split(",")[0], tmp_path / f"{run}.pt", quantization="fp8", backwards=backwards
        )
        dense[run] = torch.zeros(*sequences().shape, got.shape[-1])
        dense[run][places[:, 0], places[:, 1]] = got
    rows = [request for request, length in enumerate(LENGTHS) for _ in range(length)]
    columns = [position for length in LENGTHS for position in range(length)]
    ours, alone, turned = (each[rows, columns] for each in dense.values())
    figures = {"plugin": mean_kl(alone, ours), "vllm": mean_kl(alone, turned)}
    note("fp8", {"kl": figures})
    assert figures["plugin"] <= RATIO * figures["vllm"]
