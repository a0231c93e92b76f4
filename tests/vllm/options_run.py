"""The demo's model, as it is published, with options for vLLM's own states: `python options_run.py NAME DIRECTORY`."""

from __future__ import annotations

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "MAMBACACHE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
}

from vllm import LLM, SamplingParams
from watched import LAST_ANSWER

from mambacache.demo import MODEL
from mambacache.demo.task import ANSWER_TOKENS, DEMO_SEED, answer_text, demo_document, demo_questions, question_text

QUESTIONS = 4


def main() -> None:
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
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main()
