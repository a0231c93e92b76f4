"""Model runner V2, vLLM's own on GPUs: where a step's indices are made, and which CUDA graphs may hold our layers."""

from __future__ import annotations

from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.model_states.default import DefaultModelState


class StateCacheModelState(DefaultModelState):
    """Of a model whose states are in our pool."""

    def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str]:
        """Full graphs of decode rows alone: prefill has a grid of its own in each step."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, "mambacache"

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: CUDAGraphMode, *args: Any, for_capture: bool = False, **kwargs: Any
    ) -> Any:
        full = for_capture or cudagraph_mode == CUDAGraphMode.FULL
        padded_rows = input_batch.num_reqs_after_padding if full else None
        self.model.mambacache.begin([] if for_capture else input_batch.req_ids, padded_rows)
        return super().prepare_attn(input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs)
