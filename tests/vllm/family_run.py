"""Serve a tiny model by vLLM with the plugin, in this process: `python family_run.py NAME DIRECTORY`.

A NAME that ends in "+ngram" or "+mtp" has it verify drafts, of n-grams or of a layer of its own.

vLLM keeps globals of a model, so that each model has a process of its own.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
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

import torch
from composite_models import COMPOSITES, QWEN, TEXT_ONLY, add_processor, save_composite
from real_shapes import add_predictor, olmo_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from watched import LAST_ANSWER, check_idle

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
# The last two wait for the prompt before them. The second time each finds its own tail, at the last boundary that
# leaves a token to compute.
HITS = ([0, 0, 0, 0, 192, 128], [0, 0, 128, 256, 192, 128])
# vLLM's attention on a CPU takes heads of 32, 64, ...
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
# The names that LFM2's first checkpoints have for its sizes.
LFM2 = {
    "conv_dim": 64,
    "block_dim": 64,
    "block_multiple_of": 32,
    "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 1.0,
}
# vLLM's Mamba2 has no smallest step size.
STEPS = {"time_step_min": 1e-9}
# vLLM believes a size that Hugging Face's Mamba2 does not read, norms each group alone, and clamps no step size.
MAMBA2 = {"intermediate_size": 128, "n_groups": 1, "time_step_limit": (0.0, float("inf"))}
# vLLM runs experts without a gate on a GPU only.
NEMOTRON_H = {
    "layer_types": ["linear_attention", "full_attention", "mlp", "linear_attention", "mlp", "linear_attention"]
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 100,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "additional_config": {"mambacache": {"num_state_blocks": 64}},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
    "mtp": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
}
CORES = ("_forward_core", "_forward", "conv_ssm_forward", "forward_impl", "forward_native")
"""These methods run on all tokens of a step, by layer."""

CHANGES: dict[str, dict[str, Any]] = {
    "falcon_h1": {**HEADS, "head_dim": 32},
    "granitemoehybrid": HEADS,
    "jamba": HEADS,
    "mamba2": MAMBA2,
    "mamba2_bias": MAMBA2,
    "lfm2": {**HEADS, **LFM2},
    "lfm2_moe": HEADS,
    "olmo_hybrid": HEADS,
    "olmo_hybrid_rope": HEADS,
    "nemotron_h": {**NEMOTRON_H, **STEPS},
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "zamba2": {"num_key_value_heads": 4, **STEPS},
    "zamba2_adapters": STEPS,
}


def let_run_on_a_cpu(name: str) -> None:
    """Patch the parts of vLLM that cannot run a model on a CPU, with the plugin or without."""
    if name.startswith("olmo_hybrid"):  # it asks Triton for an allocator, and the CPU build has no Triton
        from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

        olmo_gdn_linear_attn.set_triton_allocator = lambda device: None
        # Its loader is not told which third of the convolution a weight is.
        olmo_gdn_linear_attn._make_fused_conv1d_weight_loader = lambda *args: lambda conv, whole: conv.data.copy_(whole)
    elif name.startswith("lfm2"):  # its rotation on a CPU takes [tokens, heads, dim] for one head
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        rotate = RotaryEmbedding.forward

        def rotate_flat(self: Any, positions: torch.Tensor, *heads: torch.Tensor) -> list[torch.Tensor]:
            flat = rotate(self, positions, *(each.flatten(1) for each in heads))
            return [each.view(like.shape) for each, like in zip(flat, heads, strict=True)]

        RotaryEmbedding.forward = rotate_flat


def save(name: str, directory: Path) -> Path:
    """Save a model for transformers, and return the folder of the same weights as vLLM looks for them."""
    if name in COMPOSITES:
        return save_composite(name, directory, **CHANGES.get(COMPOSITES[name].text, {}))
    kind = name.removesuffix("_puzzle")
    save_tiny_model(kind, directory, **CHANGES.get(kind, {}))
    if kind != name:
        path = directory / "config.json"
        path.write_text(path.read_text().replace("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"))
    if name == "qwen3_5":
        add_processor(directory)
    if not name.startswith("olmo_hybrid"):
        return directory
    weights = olmo_weights(load_file(directory / "model.safetensors"))
    served = directory / "served"
    AutoConfig.from_pretrained(directory).save_pretrained(served)
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    return served


def options_of(name: str) -> dict[str, Any]:
    """Return vLLM's options beside `OPTIONS`: `qwen3_5` has its vision tower, and `qwen3_5_moe` has not."""
    if name in COMPOSITES:
        return COMPOSITES[name].options
    return {"qwen3_5": {"skip_tokenizer_init": False}, "qwen3_5_moe": TEXT_ONLY}.get(name, {})


def pad(layer: Any) -> Callable[[], None]:
    """Run a layer on three tokens more than there are. Return a call that runs it as in a dummy run."""
    name = next(name for name in CORES if name in vars(type(layer)) or name in vars(type(layer).__bases__[0]))
    core, shapes = getattr(layer, name), []

    def padded(*args: torch.Tensor, **named: torch.Tensor) -> None:
        given = [*args, *named.values()]
        shapes[:] = [(each.shape, each.dtype) for each in given]
        *inputs, out = [
            torch.cat([each, torch.full_like(each[:1], torch.nan).expand(3, *each.shape[1:])]) for each in given
        ]
        core(*inputs, out)
        assert not out[-3:].any()
        given[-1].copy_(out[:-3])

    def dummy() -> None:
        assert shapes
        *inputs, out = [torch.randn(shape, dtype=dtype) for shape, dtype in shapes]
        states = layer._context.pool.buffer.clone()
        core(*inputs, out)
        assert out.isfinite().all() and torch.equal(states, layer._context.pool.buffer)

    setattr(layer, name, padded)
    return dummy


def count_drafts(states: Any) -> dict[str, int]:
    """Count the drafts of rows that are accepted from now on."""
    counts, accept = {"right": 0, "wrong": 0}, states.accept

    def counted(rows: Any, given: Any, **named: Any) -> None:
        for row in rows:
            right = max(len(given.get(row.request_id, ())) - 1, 0)
            counts["right"] += right
            counts["wrong"] += len(row.drafts) - right
        accept(rows, given, **named)

    states.accept = counted
    return counts


def draft_from(answers: dict[tuple[int, ...], list[int]], scheduler: Any) -> None:
    """Draft the known answers of these prompts, now and then with a wrong token."""
    rng, update = random.Random(0), scheduler.update_draft_token_ids

    def guess(name: str, drafts: list[int]) -> list[int]:
        known = tuple(scheduler.requests[name].all_token_ids)
        rest = [
            answer[len(known) - len(prompt) :] for prompt, answer in answers.items() if known[: len(prompt)] == prompt
        ]
        return [token if rng.random() < 0.8 else 1 for token in rest[-1][: rng.randint(0, len(drafts))]]

    def replaced(drafts: Any) -> None:
        known = [name in scheduler.requests for name in drafts.req_ids]
        drafts.draft_token_ids = [
            guess(name, guesses) if there else guesses
            for name, guesses, there in zip(drafts.req_ids, drafts.draft_token_ids, known, strict=True)
        ]
        update(drafts)

    scheduler.update_draft_token_ids = replaced


def check(original: Original, outputs: list[Any], hits: list[int]) -> None:
    """Fail unless the answers to the prompts are right, and have the right hits in the cache."""
    assert [output.num_cached_tokens for output in outputs] == hits
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        original.check(prompt, list(output.outputs[0].token_ids))


def main(name: str, directory: Path) -> None:
    from vllm import LLM, SamplingParams

    from mambacache.vllm.layers import check_all_ours

    name, _, drafts = name.partition("+")
    let_run_on_a_cpu(name)
    served = save(name, directory)
    if drafts == "mtp":
        add_predictor(served, large=1.0)
    llm = LLM(str(served), **OPTIONS | options_of(name) | DRAFTS[drafts])
    params = SamplingParams(temperature=0, max_tokens=24 if drafts else 8, ignore_eos=True, detokenize=False)
    core = llm.llm_engine.engine_core.engine_core
    counts = count_drafts(core.scheduler.prefix_cache)
    runner = core.model_executor.driver_worker.worker.model_runner
    dummies = [pad(layer) for layer in check_all_ours(runner.compilation_config.static_forward_context)]
    original = Original(directory)
    for hits in HITS:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        check(original, outputs, hits)
        if drafts:
            answers = [list(output.outputs[0].token_ids) for output in outputs]
            draft_from(dict(zip(map(tuple, PROMPTS), answers, strict=True)), core.scheduler)
    for dummy in dummies:
        dummy()
    assert not drafts or min(counts.values()) > 20, counts
    check_idle(core.scheduler.prefix_cache)
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
