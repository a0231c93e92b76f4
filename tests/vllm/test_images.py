"""Requests with images and videos have the Hugging Face model's log-probabilities, and hits computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from watched import FULL, run

CASES = (
    "qwen3_5+mtp", "lfm2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_5+ngram", "qwen3_5_moe+mtp", "interns2_preview",
    "interns2_mobius", "minicpmv4_6", "minicpmv4_7", "nemotron_nano_vl",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES if FULL else CASES[:2])
def test_prompts_share_a_prefix_up_to_the_first_image_that_differs(name: str, tmp_path: Path) -> None:
    run("image_run.py", name, tmp_path)
