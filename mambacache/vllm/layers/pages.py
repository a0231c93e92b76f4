"""Give models without attention the KV cache that vLLM needs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec


class Pages(AttentionLayerBase):
    """Gives each request a page, which is never full, so never hit."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PagesBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        size = vllm_config.cache_config.block_size
        return FullAttentionSpec(
            block_size=size, tokens_per_state=size, num_kv_heads=1, head_size=8, dtype=torch.int8
        )  # 16 bytes


class PagesBackend(AttentionBackend):
    """Provides `PagesBuilder`."""

    @staticmethod
    def get_name() -> str:
        return "MAMBACACHE_PAGES"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[AttentionMetadata]]:
        return PagesBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


class PagesBuilder(AttentionMetadataBuilder[AttentionMetadata]):
    """Builds empty metadata."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract in vLLM
        super().__init__(*args, **kwargs)

    def build(self, *args: Any, **kwargs: Any) -> AttentionMetadata:
        return AttentionMetadata()
