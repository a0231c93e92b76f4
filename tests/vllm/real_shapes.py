"""Save random models with two to four layers of the shapes of published checkpoints.

Every expert takes every token: a near tie of a router would hide the errors that are compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from quantised import round_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tiny_models import randomize

PUBLISHED = json.loads((Path(__file__).resolve().parents[1] / "checkpoint_configs.json").read_text())
PUBLISHED["Qwen3.5-9B (text part)"] = {"model_type": "qwen3_5_text"}  # the sizes that its class has by default
VOCABULARY = 512
LARGE = 8.0  # scale of embeddings, beside the values that layers add to them
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
ROTATION: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
}
CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
# vLLM does not clamp step sizes from below as transformers does.
STEPS = {"time_step_min": 1e-9}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3-Next-80B-A3B", {**LAYERS, "num_experts": 8, "num_experts_per_tok": 8}),
    "kimi_linear": ("Kimi-Linear-48B-A3B", {**LAYERS, "num_experts": 8, "num_experts_per_token": 8}),
    "nemotron_h": ("Nemotron-H-8B", {"hybrid_override_pattern": "M*-M", "num_hidden_layers": 4, **STEPS}),
    "granitemoehybrid": (
        "Granite-4.0-H-Tiny",
        {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 8,
            "num_experts_per_tok": 8,
        },
    ),
    "falcon_h1": ("Falcon-H1-7B", {"num_hidden_layers": 2}),
    "jamba": (
        "Jamba-v0.1",
        {
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 4,
        },
    ),
    "lfm2": ("LFM2-700M", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("LFM2-8B-A1B", {**CONVOLUTIONS, "num_experts": 8, "num_experts_per_tok": 8}),
    "olmo_hybrid": ("OLMo-Hybrid-7B", LAYERS),
    "falcon_mamba": ("Falcon-Mamba-7B", {"num_hidden_layers": 2}),
    "qwen3_5": ("Qwen3.5-9B (text part)", {**LAYERS, **ROTATION}),
    "qwen3_5_moe": (
        "Qwen3.5-35B-A3B (text part)",
        {**LAYERS, **ROTATION, "num_experts": 8, "num_experts_per_tok": 8},
    ),
    "lfm2_vl": ("LFM2-700M", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
}
QUANTISED_ONLY = {
    "nemotron_3": (
        "Nemotron-3-Nano-30B-A3B",
        {
            "hybrid_override_pattern": "ME*E",
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 8,
            **STEPS,
        },
    )
}
"""Only quantised checkpoints have these layers in tests."""
WITH_IMAGES = {
    "qwen3_5": {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
    "qwen3_5_moe": {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"},
    "lfm2_vl": {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "vision_config": {"model_type": "siglip2_vision_model"},
    },
}
"""Checkpoints with these settings have such layers in their text part. vLLM serves them without the rest."""


def config_of(name: str) -> PreTrainedConfig:
    checkpoint, changes = (SHAPES | QUANTISED_ONLY)[name]
    values = PUBLISHED[checkpoint] | changes | {"vocab_size": VOCABULARY, "pad_token_id": None, "eos_token_id": 1}
    return AutoConfig.for_model(values.pop("model_type"), **values)


@torch.no_grad()
def save(name: str, directory: Path, device: str, form: str | None = None) -> Path:
    """Save the model in bf16 for transformers, and return the folder of the same weights as vLLM reads them.

    Args:
        form: a form of `quantised.FORMS`. The weights are rounded for it, and the returned folder is another folder,
            ready for `pack`.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
        randomize(model)
    model.save_pretrained(directory, max_shard_size="100GB")
    del model
    if form is not None:
        round_weights(directory, form)
    served = for_vllm(name, directory)
    return served if form is None or served != directory else copytree(directory, directory / "served")


def add_predictor(directory: Path, large: float = LARGE) -> None:
    """Give a saved Qwen3-Next or Qwen3.5 a layer that predicts one token more (MTP).

    It is often right where embeddings are large: its output layer reads a token's embedding, as the model's does, and
    the layers of both add little.
    """
    path, settings = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    index = settings.get("text_config", settings)["layer_types"].index("full_attention")
    weights = load_file(path)
    prefix = next(key for key in weights if key.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    embedding = weights[f"{prefix}embed_tokens.weight"]
    embedding *= large
    mtp = {key.replace(f"{prefix}layers.{index}.", "mtp.layers.0."): each for key, each in weights.items()}
    weights |= {key: each.clone() for key, each in mtp.items() if key.startswith("mtp.")}
    as_large = large * torch.eye(embedding.shape[1], dtype=embedding.dtype)
    weights["mtp.fc.weight"] = torch.cat([as_large, torch.zeros_like(as_large)], dim=1)  # nothing of the state
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{norm}.weight"] = torch.zeros_like(weights[f"{prefix}norm.weight"])
    save_file(weights, path, metadata={"format": "pt"})


def olmo_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give OLMo-Hybrid's weights the names that vLLM looks for, and join its convolutions."""
    for key in [key for key in weights if "q_conv1d" in key]:
        parts = [weights.pop(key.replace("q_conv1d", f"{each}_conv1d")) for each in "qkv"]
        weights[key.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    for old, new in (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ):
        weights = {key.replace(old, new): weight for key, weight in weights.items()}
    return weights


def for_vllm(name: str, directory: Path) -> Path:
    """Return a folder with the names of weights and settings that vLLM reads, where transformers reads others."""
    path = directory / "config.json"
    settings = json.loads(path.read_text())
    weights = load_file(directory / "model.safetensors")
    served = directory / "served"
    served.mkdir()
    if settings["model_type"] == "kimi_linear":
        recurrent = [kind == "linear_attention" for kind in settings["layer_types"]]
        settings |= {
            "first_k_dense_replace": settings["mlp_layer_types"].count("dense"),
            "mla_use_nope": True,
            "rope_parameters": None,
            "linear_attn_config": {
                "kda_layers": [i + 1 for i, each in enumerate(recurrent) if each],
                "full_attn_layers": [i + 1 for i, each in enumerate(recurrent) if not each],
                "head_dim": settings["linear_head_dim"],
                "num_heads": settings["linear_num_heads"],
                "short_conv_kernel_size": settings["linear_conv_kernel_dim"],
            },
        }
        settings = {key: value for key, value in settings.items() if key not in ("layer_types", "mlp_layer_types")}
        weights = {key.replace("layers.0.block_sparse_moe", "layers.0.mlp"): each for key, each in weights.items()}
    elif name in ("lfm2", "lfm2_vl"):
        settings |= {"conv_dim": settings["hidden_size"], "block_dim": settings["hidden_size"]}
        settings |= {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    elif name == "olmo_hybrid":
        weights = olmo_weights(weights)
    elif name not in WITH_IMAGES:
        served.rmdir()
        return directory
    if name in WITH_IMAGES:
        settings = {"dtype": "bfloat16", **WITH_IMAGES[name], "text_config": settings}
        weights = {key.replace("model.", "model.language_model.", 1): each for key, each in weights.items()}
    (served / "config.json").write_text(json.dumps(settings))
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    return served
