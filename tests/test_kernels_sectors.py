"""Check that the first launch of prefill writes whole sectors of memory: half a sector takes longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_cases import BF16, FP16, FP32, MODELS, Batch, Mix
from mambacache.kernels import api, gpu

SECTOR = 32  # bytes
MIX = Mix((), (135, 65, 8))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, FP16) for op in ("gated_delta_rule", "kda", "ssd")]
    + [pytest.param(op, BF16, marks=pytest.mark.gpu) for op in ("gated_delta_rule", "kda")],
)
def test_scratch(op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, new_empty = [], Tensor.new_empty

    def recorded(*args: Any, **options: Any) -> Tensor:
        x = new_empty(*args, **options)
        if x.dtype == dtype:
            scratch.append(x.fill_(torch.nan))
        return x

    batch = Batch(next(iter(MODELS[op].values()))(8)(), MIX, (dtype, FP32), padding=0)
    monkeypatch.setattr(api, "backend", lambda x: gpu)
    monkeypatch.setattr(Tensor, "new_empty", recorded)
    batch.run()
    assert scratch
    for x in scratch:
        written = ~x.isnan().view(-1, SECTOR // x.element_size())
        assert torch.equal(written.any(1), written.all(1))
