"""One tiny model served by vLLM with the plugin, in this process: `python family_run.py NAME DIRECTORY`.

vLLM keeps globals of a model, so that each model has a process of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "MAMBACACHE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

from engine_driver import Original, tokens_of
from tiny_models import save_tiny_model

SHARED = tokens_of(1, 200)
PROMPTS = [
    tokens_of(2, 1),
    tokens_of(3, 64),
    tokens_of(4, 150),
    SHARED + tokens_of(5, 100),
    SHARED + tokens_of(6, 50),
    SHARED[:130] + tokens_of(7, 20),
]
# The last two wait for the one before them. The second time each finds its own tail, at the last boundary that leaves
# a token to compute.
HITS = ([0, 0, 0, 0, 192, 128], [0, 0, 128, 256, 192, 128])
# What vLLM's attention on a CPU takes: heads of 32, 64, ...
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
# LFM2 as its first checkpoints name its sizes.
LFM2 = {
    "conv_dim": 64,
    "block_dim": 64,
    "block_multiple_of": 32,
    "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 1.0,
}
# vLLM's Mamba2 takes step sizes as they come.
STEPS = {"time_step_min": 0.0}
# vLLM has experts without a gate on a GPU only.
NEMOTRON_H = {"layer_types": ["linear_attention", "full_attention", "mlp", "linear_attention", "mlp", "linear_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    "falcon_h1": {**HEADS, "head_dim": 32},
    "granitemoehybrid": HEADS,
    "jamba": HEADS,
    "kimi_linear": {"mla_use_nope": True},
    "lfm2": {**HEADS, **LFM2},
    "lfm2_moe": HEADS,
    "nemotron_h": {**NEMOTRON_H, **STEPS},
    "zamba2": {"num_key_value_heads": 4, **STEPS},
    "zamba2_adapters": STEPS,
}


def let_run_on_a_cpu(name: str) -> None:
    """What vLLM asks of a GPU though it could do without."""
    if name.startswith("olmo_hybrid"):
        from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

        olmo_gdn_linear_attn.set_triton_allocator = lambda device: None
    elif name.startswith("kimi_linear"):
        import torch

        os.environ |= {"VLLM_KIMI_K3_GEMM_AR": "0", "VLLM_ENABLE_GEMM_RS": "0"}
        torch.cuda.Stream = type("Stream", (), {})


def main(name: str, directory: Path) -> None:
    from vllm import LLM, SamplingParams

    let_run_on_a_cpu(name)
    save_tiny_model(name, directory, **CHANGES.get(name, {}))
    llm = LLM(
        str(directory),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=100,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        additional_config={"mambacache": {"num_state_blocks": 64}},
    )
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    original = Original(directory)
    for hits in HITS:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == hits
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            original.check(prompt, list(output.outputs[0].token_ids))
    states = llm.llm_engine.engine_core.engine_core.scheduler.states
    states.check()
    blocks = states.stats.state_blocks
    assert blocks["writing"] == 0 and blocks["committed"] == blocks["evictable"]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
