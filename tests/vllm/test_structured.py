"""Structured outputs, KV in fp8 and new weights in vLLM agree with Hugging Face, with hits computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from watched import FULL, run

STRUCTURED = ("qwen3_5_moe+mtp", "qwen3_next_moe+ngram", "qwen3_next_moe", "falcon_h1+ngram")
FP8_KV = ("qwen3_next_moe", "qwen3_5_moe")
RELOADED = (["qwen3_5_text"], ["falcon_h1", "ahead"])  # on a CPU vLLM reloads no experts rightly
LEFT = pytest.mark.skipif(not FULL, reason="MAMBACACHE_FAMILIES=all runs it")
VECTORS = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
NEEDS_VECTORS = pytest.mark.skipif(not VECTORS, reason="vLLM's KV in fp8 on a CPU needs AVX-512 or AMX")


@pytest.mark.parametrize("name", STRUCTURED if FULL else STRUCTURED[:1])
def test_constrained_and_free_requests_share_a_prefix_in_a_batch(name: str, tmp_path: Path) -> None:
    run("structured_run.py", name, tmp_path)


@NEEDS_VECTORS
@pytest.mark.parametrize("name", FP8_KV if FULL else FP8_KV[:1])
def test_a_hit_over_kv_in_fp8_equals_a_cold_prompt(name: str, tmp_path: Path) -> None:
    run("options_run.py", name, tmp_path)


@LEFT
@NEEDS_VECTORS
@pytest.mark.parametrize("name", FP8_KV)
def test_errors_with_kv_in_fp8_match_vllm_alone(name: str, tmp_path: Path) -> None:
    for how in ("alone", "bfloat16"):
        run("options_run.py", name, tmp_path, how)


@pytest.mark.parametrize("case", RELOADED if FULL else RELOADED[:1], ids=" ".join)
def test_a_reset_after_new_weights_leaves_nothing_of_old_weights(case: list[str], tmp_path: Path) -> None:
    run("reload_run.py", case[0], tmp_path, *case[1:])
