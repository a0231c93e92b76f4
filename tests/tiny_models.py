"""Save tiny random checkpoints of each supported model type, with weights at scales where states matter.

Logits have about unit scale. Decays lie between 0.2 and 0.999 a token: a state remembers hundreds of tokens, and a
wrong state shows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
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
    Zamba2Config,
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
_KIMI: dict[str, Any] = {
    **{key: value for key, value in _COMMON.items() if not key.startswith("linear")},
    "num_key_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
}
_LFM2: dict[str, Any] = {
    **{key: value for key, value in _COMMON.items() if not key.startswith("linear")},
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
_MAMBA2: dict[str, Any] = {
    key: value for key, value in _COMMON.items() if not key.startswith(("linear", "layer_types"))
}
_MAMBA1 = {key: value for key, value in _MAMBA2.items() if not key.startswith(("num_attention", "num_key", "max_pos"))}
_JAMBA = {**_MAMBA2, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 4}
_HYBRID_MAMBA2 = {**_MAMBA2, "mamba_n_heads": 4, "mamba_d_state": 16}
_GRANITE: dict[str, Any] = {
    **_HYBRID_MAMBA2,
    "layer_types": _COMMON["layer_types"],
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.8,
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.5,
    "shared_intermediate_size": 32,
}
_FALCON_H1: dict[str, Any] = {
    **_HYBRID_MAMBA2,
    "num_hidden_layers": 3,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "ssm_multipliers": [0.8, 1.25, 0.9, 1.1, 0.7],
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.1,
    "attention_in_multiplier": 1.2,
    "key_multiplier": 0.7,
}
_ZAMBA2: dict[str, Any] = {
    **_MAMBA2,
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
    "n_mamba_heads": 4,
    "mamba_d_state": 16,
    "mamba_ngroups": 2,
    "time_step_min": 0.2,
    "adapter_rank": 8,
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
        "kimi_linear": KimiLinearConfig(**_KIMI),
        "kimi_linear_lora": KimiLinearConfig(**_KIMI, q_lora_rank=24, num_expert_group=4, topk_group=2),
        "lfm2": Lfm2Config(**_LFM2),
        "lfm2_bias": Lfm2Config(**_LFM2, conv_bias=True, conv_L_cache=4, tie_word_embeddings=False),
        "lfm2_moe": Lfm2MoeConfig(**_LFM2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
        "mamba2": Mamba2Config(**_MAMBA2, num_heads=4, head_dim=32, state_size=16, n_groups=2),
        "mamba2_bias": Mamba2Config(
            **_MAMBA2,
            num_heads=4,
            head_dim=32,
            state_size=48,
            n_groups=4,
            conv_kernel=2,
            use_bias=True,
            use_conv_bias=False,
            time_step_limit=(0.2, 0.8),
        ),
        "bamba": BambaConfig(**_HYBRID_MAMBA2, attn_layer_indices=[1]),
        "granitemoehybrid": GraniteMoeHybridConfig(**_GRANITE, num_local_experts=4),
        "granitemoehybrid_rope": GraniteMoeHybridConfig(
            **_GRANITE, num_local_experts=0, position_embedding_type="rope", mamba_n_groups=4, mamba_proj_bias=True
        ),
        "nemotron_h": NemotronHConfig(
            **_MAMBA2,
            head_dim=32,
            hybrid_override_pattern="M*-MEM",
            mamba_num_heads=6,
            mamba_head_dim=16,
            ssm_state_size=32,
            n_groups=2,
            time_step_min=0.2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
        "falcon_h1": FalconH1Config(**_FALCON_H1),
        "falcon_h1_norm": FalconH1Config(**_FALCON_H1, mamba_rms_norm=True, mamba_proj_bias=True),
        "falcon_h1_gate_first": FalconH1Config(**_FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False),
        "zamba2": Zamba2Config(**_ZAMBA2, num_mem_blocks=2, use_mem_rope=True),
        "zamba2_adapters": Zamba2Config(
            **_ZAMBA2 | {"num_key_value_heads": 4},
            num_mem_blocks=2,
            use_shared_attention_adapter=True,
            add_bias_linear=True,
        ),
        "mamba": MambaConfig(**_MAMBA1),
        "falcon_mamba": FalconMambaConfig(
            **_MAMBA1, use_bias=True, use_conv_bias=False, conv_kernel=3, tie_word_embeddings=False
        ),
        "jamba": JambaConfig(**_JAMBA, mamba_d_state=24, mamba_proj_bias=True),
    }


TINY_MODELS = tuple(_configs())
"""`save_tiny_model` knows these names."""


def save_tiny_model(name: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random model as a safetensors checkpoint in float32.

    Args:
        name: one of `TINY_MODELS`.
        directory: the folder of the checkpoint.
        changes: settings that replace settings of the model's (text) config.

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
    """Draw all weights: products keep unit scale, norms lie around 1, gates and decays are spread."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(math.log(0.05), math.log(2.0))
        elif name.endswith(("dt_bias", "dt_proj.bias")):
            weight.uniform_(-4.0, 0.5)
        elif "conv1d" in name:
            weight.normal_(std=0.7)
        elif weight.dim() > 1:
            fan_in = 1 if "embed" in name and not model.config.tie_word_embeddings else weight.shape[-1]
            weight.normal_(std=fan_in**-0.5)
        else:
            weight.add_(0.2 * torch.randn_like(weight))
