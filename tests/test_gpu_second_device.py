"""Run ops and an engine on a GPU that is not the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_cases import FP32, MODELS
from kernel_cases import Pool, Row, assert_bitwise, run_rows
from kernel_ops import OPS
from mambacache import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("name", MODELS)
def test_ops_run_on_the_current_device(name: str) -> None:
    op = OPS[name]()
    inputs, outputs = op.inputs(70, FP32), []
    for index in (0, 1):
        pool = Pool(op.state_shape, FP32, device=f"cuda:{index}")
        rows = [(Row(70, 0, pool.take()), inputs)]
        with torch.cuda.device(1 - index), pytest.raises(ValueError, match=f"under torch.cuda.device.{index}."):
            run_rows(op, pool, [], rows)
        with torch.cuda.device(index):
            outputs += run_rows(op, pool, [], rows)
    assert_bitwise(*outputs)


def test_an_engine_runs_on_its_device(text_model: Path) -> None:
    prompt, sampling = list(range(1, 100)), SamplingParams(temperature=0.0, max_tokens=8)
    answers = []
    for name in ("cuda:0", "cuda:1"):
        llm = LLM(text_model, device=name, kv_cache_bytes=4_000_000, checkpoint_budget_bytes=1_000_000, max_num_seqs=4)
        answers.append(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)
        assert torch.cuda.current_device() == 0
    assert answers[0] == answers[1]
