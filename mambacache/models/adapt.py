"""Replace layers in models of transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import LocalEntryNotFoundError

from mambacache.kernels import StateIndices, StateTensor
from mambacache.models import gated_delta_net, mamba1, mamba2
from mambacache.models.attention import ATTENTION, kv_layer
from mambacache.models.experts import EXPERTS, MIXTURES
from mambacache.models.kimi_delta_attention import KimiDeltaAttention
from mambacache.models.layer import ForwardContext, KVLayer, Mixer, forward_context
from mambacache.models.norm import NORMS
from mambacache.models.short_conv import ShortConv

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelType:
    mixer: str
    adapt: Callable[[Any], Mixer]
    attention: str | None = None


MODEL_TYPES = {
    "bamba": ModelType("BambaMixer", mamba2.from_mamba2, "BambaAttention"),
    "falcon_h1": ModelType("FalconH1Mixer", mamba2.from_falcon_h1, "FalconH1Attention"),
    "falcon_mamba": ModelType("FalconMambaMixer", mamba1.from_normed_mamba),
    "granitemoehybrid": ModelType("GraniteMoeHybridMambaLayer", mamba2.from_mamba2, "GraniteMoeHybridAttention"),
    "jamba": ModelType("JambaMambaMixer", mamba1.from_normed_mamba, "JambaAttention"),
    "kimi_linear": ModelType("KimiLinearDeltaAttention", KimiDeltaAttention, "KimiLinearAttention"),
    "lfm2": ModelType("Lfm2ShortConv", ShortConv, "Lfm2Attention"),
    "lfm2_moe": ModelType("Lfm2MoeShortConv", ShortConv, "Lfm2MoeAttention"),
    "mamba": ModelType("MambaMixer", mamba1.from_mamba),
    "mamba2": ModelType("Mamba2Mixer", mamba2.from_mamba2),
    "nemotron_h": ModelType("NemotronHMamba2Mixer", mamba2.from_mamba2, "NemotronHAttention"),
    "olmo_hybrid": ModelType("OlmoHybridGatedDeltaNet", gated_delta_net.from_olmo_hybrid, "OlmoHybridAttention"),
    "qwen3_5_moe_text": ModelType("Qwen3_5MoeGatedDeltaNet", gated_delta_net.from_qwen3_5, "Qwen3_5MoeAttention"),
    "qwen3_5_text": ModelType("Qwen3_5GatedDeltaNet", gated_delta_net.from_qwen3_5, "Qwen3_5Attention"),
    "qwen3_next": ModelType("Qwen3NextGatedDeltaNet", gated_delta_net.from_qwen3_next, "Qwen3NextAttention"),
    "zamba2": ModelType("Zamba2MambaMixer", mamba2.from_mamba2, "Zamba2Attention"),
}
"""Supported types of models, or of a checkpoint's text part."""


@dataclass
class Model:
    """Holds an adapted causal language model."""

    module: PreTrainedModel
    config: PreTrainedConfig
    mixers: tuple[Mixer, ...]
    kv_layers: tuple[KVLayer, ...]

    def state_layers(self, state_dtype: torch.dtype) -> list[tuple[StateTensor, ...]]:
        return [mixer.state_layout(state_dtype) for mixer in self.mixers]

    def log_layers(self, state_dtype: torch.dtype) -> list[tuple[StateTensor, ...]]:
        return [mixer.log_layout(state_dtype) for mixer in self.mixers]

    @torch.inference_mode()
    def logits(
        self,
        indices: StateIndices,
        states: Sequence[tuple[torch.Tensor, ...]],
        logs: Sequence[tuple[torch.Tensor, ...]],
        pages: Sequence[tuple[torch.Tensor, ...]],
    ) -> torch.Tensor:
        """Run one step, and return the logits at `logits_index`, [L, vocabulary].

        Args:
            states: tensors [blocks, ...] by recurrent layer.
            logs: tensors [slots, ...] by recurrent layer.
            pages: keys and values [blocks, block_size, heads, dim] by attention layer.
        """
        with forward_context(ForwardContext(indices, states, logs, pages)):
            output = self.module(
                input_ids=indices.tokens[None],
                position_ids=indices.positions[None],
                attention_mask=None,
                use_cache=False,
                logits_to_keep=indices.logits_index,
            )
        return output.logits[0]


def read_config(model: str | Path, revision: str | None = None) -> PreTrainedConfig:
    """Return the configuration of a checkpoint's text part.

    Raises:
        ValueError: config.json is absent, unusable or of an unsupported model type.
    """
    if Path(model).is_file():
        raise ValueError(f"{model} is a file: give the directory that holds it")
    whole, model_type = None, None
    try:
        raw, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
        if raw and (model_type := raw.get("model_type")) in CONFIG_MAPPING:
            whole = AutoConfig.from_pretrained(model, revision=revision)
    except OSError as error:
        raise ValueError(_not_fetched(model, error) or _no_config(model)) from error
    except Exception as error:  # transformers raises any type for bad values
        raise _unusable(model, error) from error
    if not raw:
        raise ValueError(_no_config(model))
    if whole is not None:
        config = whole.get_text_config()
        if config.model_type in MODEL_TYPES and type(whole) in MODEL_FOR_CAUSAL_LM_MAPPING:
            if config.model_type != model_type:
                logger.warning("%s: only the text part of this %s checkpoint is loaded", model, model_type)
            return config
    raise ValueError(f"model type {model_type!r} of {model} is not supported: use one of {', '.join(MODEL_TYPES)}")


def load_model(
    model: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", revision: str | None = None
) -> Model:
    """Load and adapt a checkpoint's text part; arguments as in `EngineConfig`.

    Raises:
        ValueError: see `read_config`; or weights are absent, unreadable, or do not fit the configuration.
    """
    config = read_config(model, revision)
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            model,
            revision=revision,
            dtype=_resolve_dtype(dtype, config, device),
            attn_implementation=ATTENTION,
            experts_implementation=EXPERTS,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        unread = f"the weights of {model} cannot be read: put complete safetensors files there"
        raise ValueError(_not_fetched(model, error) or unread) from error
    wrong = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if wrong:
        raise ValueError(
            f"{len(wrong)} weights of {model} are missing or of another shape than its config says, the first is "
            f"{wrong[0]}: use a complete checkpoint"
        )
    return adapt(module.eval().requires_grad_(False).to(device))


def model_skeleton(
    model: str | Path, dtype: str = "auto", device: str | torch.device = "cpu", revision: str | None = None
) -> Model:
    """Return `load_model`'s model on the meta device, without weights."""
    config = read_config(model, revision)
    resolved = _resolve_dtype(dtype, config, device)
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config,
                dtype=resolved,
                attn_implementation=ATTENTION,
                experts_implementation=EXPERTS,
            )
    except Exception as error:
        raise _unusable(model, error) from error
    return adapt(module)


def adapt(module: PreTrainedModel) -> Model:
    """Replace the layers of a model, in place.

    Build it with `attn_implementation=ATTENTION`; `experts_implementation=EXPERTS` makes it faster.

    Raises:
        ValueError: the model has no recurrent layer, or an activation is not SiLU.
    """
    config = module.config
    model_type = MODEL_TYPES[config.model_type]
    attention = [child for child in module.modules() if type(child).__name__ == model_type.attention]
    kv_layers = tuple(kv_layer(child, config, module.dtype) for child in attention)
    for number, child in enumerate(attention):
        child.number = number
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == model_type.mixer
    ]
    mixers: list[Mixer] = []
    for parent, name in places:  # frees each layer's old weights before the next
        mixer = model_type.adapt(getattr(parent, name))
        mixer.number = len(mixers)
        mixers.append(mixer)
        setattr(parent, name, mixer)
    if not mixers:
        raise ValueError(f"this {config.model_type} model has attention layers only: serve it with another engine")
    for parent in [*module.modules()]:
        for name, child in parent.named_children():
            kind = type(child).__name__
            if replace := NORMS.get(kind) or MIXTURES.get(kind):
                setattr(parent, name, replace(child))
    return Model(module, config, tuple(mixers), kv_layers)


def _resolve_dtype(dtype: str, config: PreTrainedConfig, device: str | torch.device) -> torch.dtype:
    if dtype != "auto":
        return getattr(torch, dtype)
    if torch.device(device).type == "cpu":
        return torch.float32
    return config.dtype or torch.float32


def _unusable(model: str | Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(
        f"the config.json of {model} cannot be used ({reason}): put the one that belongs to its weights there"
    )


def _no_config(model: str | Path) -> str:
    return f"{model} holds no readable config.json: give the directory of a checkpoint, or a Hub id"


def _not_fetched(model: str | Path, error: BaseException) -> str | None:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    first = causes[-1]
    if not any(isinstance(each, LocalEntryNotFoundError) for each in causes):
        return None
    if isinstance(first, LocalEntryNotFoundError):
        return f"{model} is not cached, and HF_HUB_OFFLINE keeps it from being fetched: give a directory"
    reason = (isinstance(first, OSError) and first.strerror) or str(first) or type(first).__name__
    return (
        f"{model} is no directory, and the Hub cannot be reached for it ({reason.lower()}): give a directory, or set "
        "HF_HUB_OFFLINE=1 with a cached model"
    )
