"""Run one tiny model with two LoRA adapters and drafts in vLLM: `python lora_run.py NAME DIRECTORY`.

Prompts of both adapters and of none run together. The tokens must equal those from Hugging Face's model with the
adapter merged into its weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from family_run import CHANGES, DRAFTS, OPTIONS, PROMPTS, count_drafts, draft_from, let_run_on_a_cpu
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM
from watched import LAST_ANSWER

from engine_driver import Original
from tiny_models import save_tiny_model

RANK, ALPHA = 8, 16
TARGETS = {
    "jamba": ("in_proj", "x_proj", "dt_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"),
    "lfm2": ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj"),
}
# With LoRA vLLM runs experts by Triton only.
EXPERTS = {"jamba": {"num_experts": 1}}
ADAPTERS = ("none", "one", "two", "one", "two", "none")
"""The prompts have these adapters, in order."""


def save_adapter(name: str, directory: Path, seed: int) -> tuple[Path, Path]:
    """Save a random adapter of a model in a folder.

    Returns:
        The folder of the adapter, and the folder of a model with the adapter merged.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    adapter, merged = directory / f"adapter-{seed}", directory / f"merged-{seed}"
    tensors = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in TARGETS[name]:
            rows, columns = module.weight.shape
            a, b = torch.randn(RANK, columns) / columns**0.5, torch.randn(rows, RANK) / RANK**0.5 / 4
            module.weight.data += ALPHA / RANK * b @ a
            tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
    model.save_pretrained(merged)
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS[name], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter, merged


def main(name: str, directory: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    let_run_on_a_cpu(name)
    save_tiny_model(name, directory, **CHANGES[name] | EXPERTS.get(name, {}))
    originals, requests = {"none": Original(directory)}, {"none": None}
    for number, adapter in enumerate(("one", "two"), 1):
        path, merged = save_adapter(name, directory, number)
        originals[adapter], requests[adapter] = Original(merged), LoRARequest(adapter, number, str(path))
    options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
    llm = LLM(str(directory), **OPTIONS | DRAFTS["ngram"] | options)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    core = llm.llm_engine.engine_core.engine_core
    counts = count_drafts(core.scheduler.prefix_cache)
    for _ in range(2):
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            params,
            use_tqdm=False,
            lora_request=[requests[adapter] for adapter in ADAPTERS],
        )
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        for prompt, adapter, answer in zip(PROMPTS, ADAPTERS, answers, strict=True):
            originals[adapter].check(prompt, answer)
            merely = originals["none"].after(prompt, answer).argmax(-1).tolist()
            assert adapter == "none" or merely != answer, "the adapter changes nothing"
        draft_from(dict(zip(map(tuple, PROMPTS), answers, strict=True)), core.scheduler)
    assert min(counts.values()) > 20, counts
    core.scheduler.prefix_cache.check()
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
