"""Prompts with images to layers of Qwen3.5-9B on a GPU, with the plugin and without: `make test-vllm-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from watched import run

RATIO = 1.2
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_errors_with_images_are_those_of_vllm(tmp_path: Path) -> None:
    from image_errors_run import HITS, PROMPTS, save  # they set the environment of a script
    from image_run import QWEN, WithImages

    model, errors = tmp_path / "model", {}
    save(model, "cuda")
    original = WithImages(model, model, QWEN, "cuda")
    for engine in ("plugin", "vllm"):
        run("image_errors_run.py", engine, tmp_path, str(model))
        found = torch.load(tmp_path / engine)
        differences = [
            given - original.right(prompt, expanded, tokens)
            for answers in found["answers"]
            for prompt, (expanded, tokens, given) in zip(PROMPTS, answers, strict=True)
        ]
        errors[engine] = torch.cat(differences).square().mean().sqrt().item()
        assert engine == "vllm" or found["hits"] == HITS
    print(errors)
    assert errors["plugin"] <= RATIO * errors["vllm"]
