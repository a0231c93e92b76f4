"""Compare prompts with images to layers of real shapes on a GPU, with the plugin and without: `make test-vllm-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from watched import run

RATIO = 1.2
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2_vl"])
def test_errors_with_images_match_vllm(name: str, tmp_path: Path) -> None:
    from image_errors_run import hits, prompts, save  # they set the environment of a script
    from image_run import MARKS, WithImages

    model, errors = tmp_path / "model", {}
    served = save(name, model, "cuda")
    original = WithImages(model, served, MARKS[name], "cuda")
    for engine in ("plugin", "vllm"):
        run("image_errors_run.py", engine, tmp_path, name, str(model), str(served))
        found = torch.load(tmp_path / engine)
        differences = [
            given - original.right(prompt, expanded, tokens)
            for answers in found["answers"]
            for prompt, (expanded, tokens, given) in zip(prompts(name), answers, strict=True)
        ]
        errors[engine] = torch.cat(differences).square().mean().sqrt().item()
        assert engine == "vllm" or found["hits"] == hits(name)
    print(errors)
    assert errors["plugin"] <= RATIO * errors["vllm"]
