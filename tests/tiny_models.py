"""Tiny random checkpoints of each supported model type, with weights of such scales that states matter.

Logits have about unit scale. Decays lie between 0.2 and 0.999 a token, so that a state remembers hundreds of tokens and
a wrong one shows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

VOCABULARY = 160

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_QWEN = {**_COMMON, "head_dim": 32}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_OLMO = {
    **_COMMON,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 48,
    "linear_value_head_dim": 96,
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def _configs() -> dict[str, PreTrainedConfig]:
    return {
        "qwen3_next": Qwen3NextConfig(**_QWEN, num_experts=0),
        "qwen3_next_moe": Qwen3NextConfig(**_QWEN, **_EXPERTS, mlp_only_layers=[1]),
        "qwen3_5_text": Qwen3_5TextConfig(**_QWEN),
        "qwen3_5_moe_text": Qwen3_5MoeTextConfig(**_QWEN, **_EXPERTS),
        "qwen3_5": Qwen3_5Config(text_config=_QWEN, vision_config=_VISION),
        "qwen3_5_moe": Qwen3_5MoeConfig(text_config={**_QWEN, **_EXPERTS}, vision_config=_VISION),
        "olmo_hybrid": OlmoHybridConfig(**_OLMO),
        "olmo_hybrid_rope": OlmoHybridConfig(
            **_OLMO,
            linear_allow_neg_eigval=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    }


TINY_MODELS = tuple(_configs())
"""The names that `save_tiny_model` knows."""


def save_tiny_model(name: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Saves a random model as a safetensors checkpoint in float32.

    Args:
        name: one of `TINY_MODELS`.
        directory: where to.
        changes: settings that replace those of the model's (text) config.

    Returns:
        `directory`.
    """
    torch.manual_seed(seed)
    config = _configs()[name]
    for key, value in changes.items():
        setattr(config.get_text_config(), key, value)
    composites = {
        "qwen3_5": Qwen3_5ForConditionalGeneration,
        "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
    }
    model = composites[name](config) if name in composites else AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def randomize(model: PreTrainedModel) -> None:
    """Draws all weights: products keep unit scale, norms lie around 1, gates and decays are spread."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(math.log(0.05), math.log(2.0))
        elif name.endswith("dt_bias"):
            weight.uniform_(-4.0, 0.5)
        elif "conv1d" in name:
            weight.normal_(std=0.7)
        elif weight.dim() > 1:
            fan_in = 1 if "embed" in name else weight.shape[-1]
            weight.normal_(std=fan_in**-0.5)
        else:
            weight.add_(0.2 * torch.randn_like(weight))
