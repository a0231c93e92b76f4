"""Compare a small Qwen3.5 in 4 bits in vLLM with the plugin to its twin: `packed_run.py FORM FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import real_shapes
import torch
from family_run import OPTIONS  # sets the environment
from quantised import pack
from transformers import AutoModelForCausalLM
from watched import LAST_ANSWER

from engine_driver import tokens_of

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**real_shapes.ROTATION["rope_parameters"], "mrope_section": [4, 2, 2]},
}
PROMPTS = [[token % 500 + 1 for token in tokens_of(seed, 150)] for seed in range(3)]
NEAR = 0.1  # of log-probabilities, with activations in bf16: vLLM alone errs by 0.081 on a CPU with AMX


def main(form: str, directory: Path) -> None:
    checkpoint, changes = real_shapes.SHAPES["qwen3_5"]
    real_shapes.SHAPES["qwen3_5"] = checkpoint, changes | SMALL
    served = real_shapes.save("qwen3_5", directory / "twin", "cpu", form)
    pack(served, form)
    from vllm import LLM, SamplingParams

    llm = LLM(str(served), **OPTIONS | {"dtype": "bfloat16", "language_model_only": True})
    twin = AutoModelForCausalLM.from_pretrained(directory / "twin", dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    for hit in (0, 128):
        outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], params, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [hit] * len(PROMPTS)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            tokens = list(output.outputs[0].token_ids)
            with torch.inference_mode():
                logits = twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            given = torch.tensor([each[t].logprob for each, t in zip(output.outputs[0].logprobs, tokens, strict=True)])
            own = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert (own - given).abs().max() < NEAR and (logits.amax(1) - own).max() < NEAR
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
