"""Answers to prompts with images in vLLM: `python image_errors_run.py ENGINE OUT MODEL`.

ENGINE is "plugin" or "vllm". All prompts run at once, twice. The file OUT receives for each answer the prompt as the
model takes it, the answer's tokens, and their log-probabilities.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from composite_models import add_processor
from image_run import QWEN, SCENES, Prompt, WithImages, answer_of  # sets the environment
from real_shapes import LAYERS, PUBLISHED, ROTATION, VOCABULARY
from transformers import AutoConfig, AutoModelForImageTextToText
from watched import LAST_ANSWER

import tiny_models

CHECKPOINT = "Qwen3.5-9B (text part)"
PROMPTS: list[Prompt] = [scene.prompt for scene in SCENES] + [scene.other for scene in SCENES]
HITS = [[0] * len(SCENES) + [scene.before for scene in SCENES], 2 * [scene.again for scene in SCENES]]
"""The tokens that each prompt hits, the first time and the second time."""


@torch.no_grad()
def save(directory: Path, device: str, **changes: Any) -> None:
    """Save four layers of Qwen3.5-9B in bf16, two layers of its vision tower, and its processor.

    Args:
        changes: of the settings of the text part.
    """
    own = {"vocab_size": VOCABULARY, "pad_token_id": None, "eos_token_id": 1}
    settings = PUBLISHED[CHECKPOINT] | LAYERS | ROTATION | own | changes
    text = AutoConfig.for_model(settings.pop("model_type"), **settings)
    vision = {"depth": 2, "out_hidden_size": text.hidden_size}
    config = AutoConfig.for_model("qwen3_5", text_config=settings, vision_config=vision)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        tiny_models.randomize(model)
    model.lm_head.weight[tiny_models.VOCABULARY :] = 0  # no answer holds a mark of an image
    model.save_pretrained(directory, max_shard_size="100GB")
    add_processor(directory)


def main(engine: str, out: Path, model: Path) -> None:
    os.environ["MAMBACACHE"] = "1" if engine == "plugin" else "0"
    from vllm import LLM, SamplingParams

    memory = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {}
    llm = LLM(
        str(model),
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_batched_tokens=512,
        max_num_seqs=32,
        additional_config={"mambacache": {"num_state_blocks": 256}, "gdn_prefill_backend": "triton"},
        **memory,
    )
    original = WithImages(model, model, QWEN)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    given = [original.asked(prompt) for prompt in PROMPTS]
    rounds = [llm.generate(given, params, use_tqdm=False) for _ in HITS]
    answers = [[(output.prompt_token_ids, *answer_of(output)) for output in outputs] for outputs in rounds]
    torch.save({"answers": answers, "hits": [[each.num_cached_tokens for each in outputs] for outputs in rounds]}, out)
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
