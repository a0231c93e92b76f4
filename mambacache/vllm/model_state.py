"""Adapt vLLM's model runner V2 to our layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from mambacache.plan import FOLD


class StateCacheModelState(DefaultModelState):
    """Makes the indices of each step."""

    def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str]:
        """Allow full graphs of uniform decode rows: prefill grids differ from step to step."""
        return AttentionCGSupport.UNIFORM_BATCH, "mambacache"

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: CUDAGraphMode, *args: Any, for_capture: bool = False, **kwargs: Any
    ) -> Any:
        full = for_capture or cudagraph_mode == CUDAGraphMode.FULL
        names, lengths = input_batch.req_ids, input_batch.num_scheduled_tokens
        if for_capture:
            names, lengths = [], lengths[:0]
        padded = (input_batch.num_reqs_after_padding, input_batch.num_tokens_after_padding) if full else None
        self.model.mambacache.begin(names, np.asarray(lengths), padded, input_batch.positions)
        return super().prepare_attn(input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs)


class UpToTheLog:
    """Wraps vLLM's rejection sampler: drafts beyond a row's token log were not computed."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(
        self, logits: Tensor, batch: Any, draft_logits: Tensor | None = None, invalid: Tensor | None = None
    ) -> Any:
        positions = batch.positions[batch.logits_indices]
        beyond = positions // FOLD != (positions - batch.expanded_local_pos) // FOLD
        return self._sampler(logits, batch, draft_logits, beyond if invalid is None else beyond | invalid)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
