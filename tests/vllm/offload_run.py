"""Ask the trained recall model about a document that the GPU has no room for: `python offload_run.py MODE [2]`.

States come back from host memory, and KV by vLLM's OffloadingConnector. MODE is `connector` (--kv-transfer-config),
`size` (--kv-offloading-size), or `sleep`, where the engine also sleeps and wakes. On a CPU tensors stand for vLLM's
pinned memory, and fewer questions are asked.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "MAMBACACHE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check starts CUDA, and then no worker can be forked

import torch
from recall_run import asked, generate, prompt
from watched import LAST_ANSWER

from mambacache.demo import MODEL
from mambacache.demo.task import ANSWER_TOKENS

HOST_KV = 32 << 20  # the document and two rounds of other prompts, and less than a container's shared memory
ON_A_GPU = torch.cuda.is_available()
QUESTIONS = 20 if ON_A_GPU else 5
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 4608,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 90,  # the document and little else
    "gpu_memory_utilization": 0.2,
    "mamba_ssm_cache_dtype": "float32",
}
STATE_BYTES = 1_500_000  # four states and two token logs: two rows with a source and a target each take all states


def serve(mode: str, gpus: int) -> Any:
    from connectors import PlainWorker
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    states = {"state_bytes": STATE_BYTES // gpus, "state_host_bytes": "200MB"}
    own: dict[str, Any] = {
        "enable_sleep_mode": mode == "sleep",
        "tensor_parallel_size": gpus,
        "additional_config": {"mambacache": states, "gdn_prefill_backend": "triton"},
    }
    if not ON_A_GPU:
        own["enforce_eager"] = True
        CPUOffloadingSpec.get_worker = lambda spec, kv_caches: PlainWorker(kv_caches, spec.num_chunks)
    if mode == "size":
        own["kv_offloading_size"] = HOST_KV / (1 << 30)
    else:
        own["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": HOST_KV},
        )  # fmt: skip
    return LLM(str(MODEL), **OPTIONS, **own)


def check_recall(llm: Any) -> None:
    """Ask questions one by one. Between them other prompts take all pages, and states."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    for number, (question, answer) in enumerate(asked()[:QUESTIONS]):
        [output] = llm.generate(question, params, use_tqdm=False)
        assert output.outputs[0].text.strip() == answer, number
        assert output.num_cached_tokens == (4096 if number else 0), number
        generate(llm, [prompt(1000 * number + seed, 1500) for seed in range(12)], 2)


def main(mode: str, gpus: int = 1) -> None:
    llm = serve(mode, gpus)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    check_recall(llm)
    stats = scheduler.prefix_cache.stats
    assert scheduler.prefix_cache.config.num_state_blocks == 4
    assert stats.loads == QUESTIONS - 1 and not stats.failed_transfers, stats
    if mode == "sleep":
        llm.sleep(level=1)
        llm.wake_up()
        assert llm.reset_prefix_cache(reset_connector=True)
        check_recall(llm)
    scheduler.prefix_cache.check()
    assert not scheduler.prefix_cache.request_ids
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
