"""Run the trained recall model in vLLM on one GPU or two: `python recall_run.py MODE OUT.pt [2]`.

MODE is the mode of CUDA graphs: `eager`, `FULL_DECODE_ONLY` (nothing compiled), or `default`. With `sleep` the engine
also sleeps and wakes.

The run fails unless all answers and hits are right, and only our kernels touch a state. OUT.pt receives the states of
layers before the first attention, after some prompts that all modes continue alike. Attention has other kernels in
graphs.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "MAMBACACHE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
from torch.profiler import ProfilerActivity, profile
from watched import LAST_ANSWER

from engine_driver import tokens_of
from mambacache.demo import MODEL
from mambacache.demo.task import ANSWER_TOKENS, DEMO_SEED, answer_text, demo_document, demo_questions, question_text

VOCABULARY = 136
MAPPED = 13  # CU_POINTER_ATTRIBUTE_MAPPED
ROWS = 8  # a graph is captured for this size, so that no mode pads


OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 4 << 30,
    "gpu_memory_utilization": 0.2,
    "additional_config": {"mambacache": {"num_state_blocks": 200}, "gdn_prefill_backend": "triton"},
}


def serve(mode: str, gpus: int) -> Any:
    from vllm import LLM

    own = {"enforce_eager": mode == "eager", "enable_sleep_mode": mode == "sleep", "tensor_parallel_size": gpus}
    if mode == "FULL_DECODE_ONLY":
        own["compilation_config"] = {"mode": 0, "cudagraph_mode": mode}
    return LLM(str(MODEL), **OPTIONS, **own)


def asked() -> list[tuple[str, str]]:
    """Return prompts of one document with a question each, and the answers."""
    document = demo_document(DEMO_SEED)
    questions = demo_questions(document, DEMO_SEED)
    return [(f"{document.text} {question_text(name)}", answer_text(place)) for name, place in questions]


def check_recall(llm: Any) -> None:
    """Ask questions one by one, each of which hits the document. Then ask all at once, after a reset."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    prompts, right = zip(*asked(), strict=True)
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    assert [each.num_cached_tokens for each in outputs] == [0] + [4096] * (len(prompts) - 1)
    assert llm.reset_prefix_cache()
    together = llm.generate([*prompts], params, use_tqdm=False)
    assert sum(each.num_cached_tokens for each in together) == 4096 * (len(prompts) - 1)
    for answers in (outputs, together):
        assert tuple(each.outputs[0].text.strip() for each in answers) == right


def check_no_copy(llm: Any) -> None:
    """Run prompts that hit and decode. torch must get no state and no part of the pool, and copy nothing so large.

    Our kernels bypass torch's dispatcher, which notes the shapes.
    """
    views = [view for layer in pool_of(llm).layers for view in layer]
    state_shapes = {tuple(view.shape[1:]) for view in views}
    shared = prompt(1, 200)
    generate(llm, [shared + prompt(2, 20)], 4)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiled:
        generate(llm, [shared + prompt(seed, 20) for seed in range(3, 3 + ROWS)], 20)
    given = {(event.name, tuple(shape)) for event in profiled.events() for shape in event.input_shapes if shape}
    assert any(name == "aten::mm" for name, _ in given)
    touched = [each for each in given if any(each[1][-len(shape) :] == shape for shape in state_shapes)]
    assert not touched, touched
    with NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    copies = [event["args"]["bytes"] for event in events if event.get("cat") == "gpu_memcpy"]
    assert copies and max(copies) < min(view[0].numel() * view.element_size() for view in views)


def context_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.step_context


def pool_of(llm: Any) -> Any:
    return context_of(llm).pool


def is_mapped(buffer: torch.Tensor) -> bool:
    """Return whether the driver has memory behind a buffer's addresses."""
    mapped, address = ctypes.c_int(), ctypes.c_uint64(buffer.data_ptr())
    failed = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(mapped), MAPPED, address)
    return not failed and bool(mapped.value)


def check_sleep(llm: Any) -> None:
    """Check that the engine gives back the memory of states and token logs, and answers after waking as before."""
    context = context_of(llm)
    buffers = context.pool.buffer, context.logs.buffer
    for level in (1, 2):
        assert all(map(is_mapped, buffers))
        llm.sleep(level=level)
        assert not any(map(is_mapped, buffers)), "states stay on the GPU"
        llm.wake_up(tags=["weights"])
        if level == 2:
            llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        check_recall(llm)


def prompt(seed: int, count: int) -> list[int]:
    return [token % VOCABULARY for token in tokens_of(seed, count)]


def generate(llm: Any, prompts: list[list[int]], answer: int, **more: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False, **more)
    llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)


def check_states(llm: Any, out: Path) -> None:
    for layer in pool_of(llm).layers:
        for view in layer:
            view.zero_()
    generate(llm, [prompt(seed, 100) for seed in range(ROWS)], 30, allowed_token_ids=[5])
    kinds = json.loads((MODEL / "config.json").read_text())["layer_types"]
    first = [view.cpu() for layer in pool_of(llm).layers[: kinds.index("full_attention")] for view in layer]
    torch.save(first, out)


def main(mode: str, out: Path, gpus: int = 1) -> None:
    llm = serve(mode, gpus)
    if gpus == 1 and mode != "sleep":
        check_states(llm, out)
    llm.reset_prefix_cache()
    check_recall(llm)
    if mode == "eager":
        check_no_copy(llm)
    elif mode == "sleep":
        check_sleep(llm)
    states = llm.llm_engine.engine_core.engine_core.scheduler.prefix_cache
    states.check()
    assert not states.request_ids and not states.stats.state_blocks["writing"]
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
