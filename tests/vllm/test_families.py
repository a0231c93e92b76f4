"""Families of recurrent layers in vLLM have the tokens of Hugging Face's uncached forward, and hits by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from watched import FULL, run

FAMILIES = (  # the first three always, all with MAMBACACHE_FAMILIES=all
    "qwen3_next_moe",
    "falcon_h1",
    "jamba",
    "lfm2",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "olmo_hybrid_rope",
    "granitemoehybrid",
    "nemotron_h",
    "zamba2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "mamba2_bias",
    "falcon_mamba",
)
CHOSEN = FAMILIES if FULL else FAMILIES[:3]
WITH_IMAGES = (  # classes with images; the requests have none
    "qwen3_5+mtp",
    "qwen3_5_moe",
    "lfm2_vl",
    "nemotron_nano_vl",
    "minicpmv4_6",
    "minicpmv4_7",
    "interns2_preview",
    "interns2_mobius",
)
OTHER_NAMES = ("nemotron_h_puzzle",)  # other names of a class
DRAFTED = ("qwen3_5+ngram", "qwen3_5_moe+mtp") if FULL else ()


@pytest.mark.parametrize("name", [*CHOSEN, *(f"{name}+ngram" for name in CHOSEN), *WITH_IMAGES, *OTHER_NAMES, *DRAFTED])
def test_a_family_in_vllm_gives_the_tokens_and_hits_that_it_should(name: str, tmp_path: Path) -> None:
    run("family_run.py", name, tmp_path)


@pytest.mark.parametrize("name", ["kimi_linear", "alice_ai"])
def test_a_kda_layer_equals_transformers(name: str, tmp_path: Path) -> None:
    run("kimi_run.py", name, tmp_path)


@pytest.mark.parametrize("name", ["jamba", "lfm2"])
def test_lora_adapters_and_drafts_share_a_batch(name: str, tmp_path: Path) -> None:
    run("lora_run.py", name, tmp_path)
