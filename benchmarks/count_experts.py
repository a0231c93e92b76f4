"""Count the distinct experts of vLLM's decode steps with dummy weights.

    python benchmarks/count_experts.py MODEL [--rows 64] [--json OUT.json] [--options JSON]

Equal rows choose equal experts, so that decoding reads few weights and looks fast. Times with dummy weights are
meaningful if a step uses about as many experts as random choices.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

from about import about

PROMPT, DECODED, VOCABULARY = 64, 16, 250


def record_choices(worker: Any, choices: list[tuple[int, int]]) -> int:
    """Make each router append (rows, distinct experts) to `choices`, and return the number of experts in a layer."""
    experts = 0

    def note(topk_ids: Any) -> None:
        choices.append((len(topk_ids), topk_ids.unique().numel()))

    for module in worker.model_runner.model.modules():
        if hasattr(router := getattr(module, "router", None), "set_capture_fn"):
            router.set_capture_fn(note)
            experts = router.global_num_experts
    return experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--options", default="{}", help='of vLLM, such as {"language_model_only": true}')
    arguments = parser.parse_args()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments.model, load_format="dummy", dtype="bfloat16", enforce_eager=True, seed=0,
        max_model_len=1024, max_num_seqs=arguments.rows, **json.loads(arguments.options),
    )  # fmt: skip
    choices: list[tuple[int, int]] = []
    [experts] = llm.collective_rpc(partial(record_choices, choices=choices))
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": rng.choices(range(VOCABULARY), k=PROMPT)} for _ in range(arguments.rows)]
    params = SamplingParams(max_tokens=DECODED, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
    distinct = [count for rows, count in choices if rows == arguments.rows]
    found = {
        "model": Path(arguments.model).name, "rows": arguments.rows, "experts": experts, "layers_seen": len(distinct),
        "least": min(distinct), "median": statistics.median(distinct), "most": max(distinct),
    }  # fmt: skip
    print(json.dumps(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(about("torch", "triton", "vllm") | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
