"""Run attention of transformers' models over KV pages."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from mambacache.kernels import paged_attention
from mambacache.models.layer import KVLayer, current_context

ATTENTION = "mambacache"
"""Name in transformers' attention interface; without a mask function no mask is built."""


def forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write keys and values to the layer's pages, and attend over them.

    Args:
        query: [1, HQ, F, D].
        key: [1, HKV, F, D].
        value: [1, HKV, F, DV].

    Returns:
        [1, F, HQ, DV], and None for attention weights.
    """
    context = current_context()
    key_pages, value_pages = context.pages[module.number]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return paged_attention(q, k, v, key_pages, value_pages, context.indices, scale=scaling)[None], None


def kv_layer(module: Any, config: Any, dtype: torch.dtype) -> KVLayer:
    """Return KV widths; latent attention (MLA) has KV for all heads."""
    if hasattr(module, "qk_head_dim"):
        return KVLayer(module.num_heads, module.qk_head_dim, module.v_head_dim, dtype)
    return KVLayer(config.num_key_value_heads, module.head_dim, module.head_dim, dtype)


AttentionInterface.register(ATTENTION, forward)
