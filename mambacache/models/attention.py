"""Attention of transformers' models over our KV pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from mambacache.kernels import paged_attention
from mambacache.models.layer import KVLayer, current_context

ATTENTION = "mambacache"
"""The name under which `forward` is registered in transformers' attention interface. No mask function is registered
under it, so that transformers builds no mask."""


def forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends over the pages of the calling layer, after writing the step's own keys and values to them.

    Args:
        query: [1, HQ, F, D]; key: [1, HKV, F, D]; value: [1, HKV, F, DV], rotated and normalised by the caller.

    Returns:
        [1, F, HQ, DV], and no attention weights.
    """
    context = current_context()
    key_pages, value_pages = next(context.pages)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return paged_attention(q, k, v, key_pages, value_pages, context.indices, scale=scaling)[None], None


def kv_layer(module: Any, config: Any, dtype: torch.dtype) -> KVLayer:
    """The widths of an attention module with grouped key and value heads, or of a latent one (MLA), which expands keys
    and values to a head for every query, each to a width of its own."""
    if hasattr(module, "qk_head_dim"):
        return KVLayer(module.num_heads, module.qk_head_dim, module.v_head_dim, dtype)
    return KVLayer(config.num_key_value_heads, module.head_dim, module.head_dim, dtype)


AttentionInterface.register(ATTENTION, forward)
