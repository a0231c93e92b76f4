"""Answer prompts with images in vLLM: `python image_errors_run.py ENGINE OUT NAME DIRECTORY`.

ENGINE is "plugin" or "vllm", and NAME is of `SAVE`. All prompts run at once, twice. The file OUT receives for each
answer the prompt as the model takes it, the answer's tokens, and their log-probabilities.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import real_shapes
import torch
from composite_models import add_lfm2_images, add_processor
from image_run import MARKS, SCENES, Clip, Prompt, Scene, WithImages, answer_of, silence_marks  # sets the environment
from transformers import AutoConfig, AutoModelForImageTextToText
from watched import LAST_ANSWER

import tiny_models

QWEN = "Qwen3.5-9B (text part)"


def scenes(name: str) -> list[Scene]:
    """Return the scenes that a model can see."""
    return [each for each in SCENES if Clip in MARKS[name] or not each.prompt.media(Clip)]


def prompts(name: str) -> list[Prompt]:
    return [each.prompt for each in scenes(name)] + [each.other for each in scenes(name)]


def hits(name: str) -> list[list[int]]:
    """Return the tokens that each prompt hits, the first time and the second time."""
    seen = scenes(name)
    return [[0] * len(seen) + [each.before for each in seen], 2 * [each.again for each in seen]]


@torch.no_grad()
def save_qwen3_5(directory: Path, device: str, **changes: Any) -> Path:
    """Save four layers of Qwen3.5-9B in bf16, two layers of its vision tower, and its processor.

    Args:
        changes: changed settings of the text part.
    """
    own = {"vocab_size": real_shapes.VOCABULARY, "pad_token_id": None, "eos_token_id": 1}
    settings = real_shapes.PUBLISHED[QWEN] | real_shapes.LAYERS | real_shapes.ROTATION | own | changes
    text = AutoConfig.for_model(settings.pop("model_type"), **settings)
    vision = {"depth": 2, "out_hidden_size": text.hidden_size}
    config = AutoConfig.for_model("qwen3_5", text_config=settings, vision_config=vision)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        tiny_models.randomize(model)
    model.save_pretrained(directory, max_shard_size="100GB")
    add_processor(directory)
    return directory


def save_lfm2_vl(directory: Path, device: str) -> Path:
    """Save four layers of LFM2 in bf16, two layers of its vision tower, and its processor."""
    served = real_shapes.save("lfm2_vl", directory, device)
    path = served / "config.json"
    settings = json.loads(path.read_text())
    settings["vision_config"] |= {"num_hidden_layers": 2, "vision_use_head": False}
    path.write_text(json.dumps(settings | {"image_token_id": tiny_models.VOCABULARY}))
    add_lfm2_images(served)
    return served


SAVE = {"qwen3_5": save_qwen3_5, "lfm2_vl": save_lfm2_vl}
"""The function of a name saves a model for transformers, and returns the folder that vLLM serves."""


def save(name: str, directory: Path, device: str) -> Path:
    """Save a model that never answers with a mark of an image. Return the folder that vLLM serves."""
    served = SAVE[name](directory, device)
    silence_marks(served)
    return served


def main(engine: str, out: Path, name: str, directory: Path, served: Path) -> None:
    os.environ["MAMBACACHE"] = "1" if engine == "plugin" else "0"
    from vllm import LLM, SamplingParams

    memory = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {}
    llm = LLM(
        str(served),
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_batched_tokens=512,
        max_num_seqs=32,
        additional_config={"mambacache": {"num_state_blocks": 256}, "gdn_prefill_backend": "triton"},
        **memory,
    )
    original = WithImages(directory, served, MARKS[name])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    given = [original.asked(prompt) for prompt in prompts(name)]
    rounds = [llm.generate(given, params, use_tqdm=False) for _ in range(2)]
    answers = [[(output.prompt_token_ids, *answer_of(output)) for output in outputs] for outputs in rounds]
    torch.save({"answers": answers, "hits": [[each.num_cached_tokens for each in outputs] for outputs in rounds]}, out)
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:]))
