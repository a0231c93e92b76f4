"""Serve models with options of vLLM that concern states and pages: `python options_run.py NAME DIRECTORY [HOW]`.

The NAME "recall" is the demo's model, as it is published, with options for vLLM's own states. Any other NAME is a tiny
model with KV in fp8. HOW is "float32" by default, "bfloat16", or "alone": in bfloat16 without the plugin.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from family_run import CHANGES, HITS, OPTIONS, PROMPTS, options_of  # sets the environment
from safetensors.torch import load_file, save_file
from watched import LAST_ANSWER

from engine_driver import Original
from mambacache.demo import MODEL
from mambacache.demo.task import ANSWER_TOKENS, DEMO_SEED, answer_text, demo_document, demo_questions, question_text
from tiny_models import save_tiny_model

QUESTIONS = 4
ANSWER = 24
FP8_KV: dict[str, Any] = {
    # With all experts in use no rounding chooses others. vLLM's own recurrent kernels on a CPU take these heads.
    "changes": {"num_experts_per_tok": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "options": {"kv_cache_dtype": "fp8", "max_logprobs": -1, "enable_prefix_caching": True},
}
LEAST, MOST = 0.003, 0.03
"""The errors of log-probabilities with KV in fp8 lie between these, root of the mean square. A smaller error means KV
in another dtype."""
SAME = 1e-3
"""Log-probabilities after a hit may differ by this from a cold prompt's."""


def recall() -> None:
    from vllm import LLM, SamplingParams

    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    llm = LLM(
        str(MODEL),
        enforce_eager=True,
        max_num_seqs=8,
        mamba_cache_mode="align",
        mamba_block_size=128,
        mamba_backend="flashinfer",
        prefix_match_unit=16,
        enable_mamba_shared_prefix_checkpoint=True,
        additional_config={"mambacache": {"num_state_blocks": 64}},
    )
    document = demo_document(DEMO_SEED)
    asked = demo_questions(document, DEMO_SEED)[:QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    for number, (name, place) in enumerate(asked):
        (output,) = llm.generate(f"{document.text} {question_text(name)}", params, use_tqdm=False)
        assert output.outputs[0].text.strip() == answer_text(place)
        assert output.num_cached_tokens == (4096 if number else 0)


def save_rounded(name: str, directory: Path) -> None:
    """Save a tiny model with weights that are numbers of bfloat16."""
    save_tiny_model(name, directory, **CHANGES.get(name, {}) | FP8_KV["changes"])
    path = directory / "model.safetensors"
    weights = {key: weight.bfloat16().float() for key, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def log_probabilities(output: Any) -> torch.Tensor:
    """Return the log-probabilities of an answer, [tokens, vocabulary]."""
    return torch.tensor([[each[token].logprob for token in range(len(each))] for each in output.outputs[0].logprobs])


def fp8_kv(name: str, directory: Path, how: str) -> None:
    """Check hits, and the errors against Hugging Face's float32 forward: at most 1.2 times those from vLLM alone."""
    from vllm import LLM, SamplingParams

    alone, of_alone = how == "alone", directory / "error of vLLM alone"
    os.environ["MAMBACACHE"] = "0" if alone else "1"
    if not directory.exists():
        save_rounded(name, directory)
    dtype = "float32" if how == "float32" else "bfloat16"
    llm = LLM(str(directory), **OPTIONS | options_of(name) | FP8_KV["options"] | {"dtype": dtype})
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert {cache.dtype.itemsize for cache in runner.kv_caches if torch.is_tensor(cache)} == {1}
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=-1)
    original, cold, errors = Original(directory), None, []
    for hits in HITS:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        found = torch.stack([log_probabilities(output) for output in outputs])
        wanted = torch.stack([original.after(*each) for each in zip(PROMPTS, answers, strict=True)]).log_softmax(-1)
        errors.append((found - wanted).square().mean().sqrt().item())
        behind = wanted.max(-1).values - wanted.gather(-1, torch.tensor(answers)[..., None])[..., 0]
        print(how, "error", errors[-1], "behind", behind.max().item(), flush=True)
        assert alone or [output.num_cached_tokens for output in outputs] == hits
        if how == "float32":
            assert LEAST < errors[-1] < MOST and behind.max() < 5 * MOST
            cold = (answers, found) if cold is None else cold
            print("hit against cold", (found - cold[1]).abs().max().item(), flush=True)
            assert answers == cold[0]
            torch.testing.assert_close(found, cold[1], atol=SAME, rtol=0)
    if alone:
        of_alone.write_text(str(max(errors)))
    elif how == "bfloat16":
        assert max(errors) < 1.2 * float(of_alone.read_text())


if __name__ == "__main__":
    if sys.argv[1] == "recall":
        recall()
    else:
        fp8_kv(sys.argv[1], Path(sys.argv[2]), *(sys.argv[3:] or ["float32"]))
    print(LAST_ANSWER, flush=True)
