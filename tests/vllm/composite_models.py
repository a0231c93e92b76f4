"""Save tiny checkpoints of classes that have a tiny model as their text part.

Weights and settings have the names of published checkpoints. A checkpoint's own folder holds the files for
transformers, and its folder `served` is for vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tiny_models import VOCABULARY, randomize, save_tiny_model

MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""These tokens come after the tokens of prompts."""
LFM2_MARKS = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
"""LFM2-VL has these tokens in their place."""
MINICPM_MARKS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip
"""MiniCPM-V has these tokens in their place, by the names that its processor has for them."""
SLICES = 4
"""MiniCPM-V cuts a large image into this many slices at most."""
NANO_MARKS = ("<image>", "<video>", "<img>", "</img>")
"""Nemotron Nano has these tokens in their place."""
MAX_IMAGE_TOKENS = 256
SIDE = 32
"""A part of an image of this many pixels across and down becomes a token."""
TEXT_ONLY = {"language_model_only": True}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN: dict[str, Any] = {
    "vocab_size": VOCABULARY + len(MARKS),
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
QWEN_TOKENS = {
    name: VOCABULARY + place
    for place, name in enumerate(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"))
}
BANKS = 2

Weights = dict[str, torch.Tensor]


class NanoConfig(PreTrainedConfig):
    """Hold the settings of Nemotron Nano: their own class comes with its checkpoints."""

    model_type = "NemotronH_Nano_VL_V2"

    def __init__(self, text_config: Any = None, vision_config: Any = None, **kwargs: Any) -> None:
        self.text_config = AutoConfig.for_model(**text_config) if isinstance(text_config, dict) else text_config
        self.vision_config = PreTrainedConfig(**vision_config) if isinstance(vision_config, dict) else vision_config
        super().__init__(**kwargs)


AutoConfig.register(NanoConfig.model_type, NanoConfig)


def named(layers: str, head: str) -> Callable[[Weights], Weights]:
    """Return a function that puts these prefixes in place of `model.` and `lm_head.`."""
    return lambda weights: {
        layers + key.removeprefix("model.") if key.startswith("model.") else head + key.removeprefix("lm_head."): weight
        for key, weight in weights.items()
    }


def bank_of(key: str) -> str | None:
    """Return the name under which Intern-S2-Mobius has a weight that layers share."""
    layer, _, rest = key.removeprefix("model.layers.").partition(".mlp.")
    return f"model.meta_mlp.{int(layer) % BANKS}.{rest}" if rest.startswith(("gate.", "experts.")) else None


def as_banks(weights: Weights) -> Weights:
    weights = {bank_of(key) or key: weight for key, weight in weights.items()}
    return named("model.language_model.", "lm_head.")(weights)


class Composite(NamedTuple):
    """Describe a checkpoint of a class with a text part.

    Attributes:
        text: the tiny model of its text part.
        settings: the checkpoint's settings beside the text part's.
        names: gives weights the names of the checkpoint.
        options: vLLM's options.
        changes: changed settings of the text part.
        add_images: gives the folder that vLLM serves a vision tower and a processor of images.
    """

    text: str
    settings: dict[str, Any]
    names: Callable[[Weights], Weights]
    options: dict[str, Any] = TEXT_ONLY
    changes: dict[str, Any] = {}  # noqa: RUF012
    add_images: Callable[[Path], None] | None = None


def add_lfm2_images(served: Path) -> None:
    """Give a saved LFM2-VL random weights of a vision tower and a projector, and a processor of images."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(served)
    model = AutoModelForImageTextToText.from_config(config, dtype=config.dtype)
    randomize(model)
    model.save_pretrained(served / "images")
    weights = load_file(served / "images" / "model.safetensors")
    tower = {
        key.replace("vision_tower.", "vision_tower.vision_model."): weight
        for key, weight in weights.items()
        if not key.startswith(("model.language_model", "lm_head"))
    }
    save_file(load_file(served / "model.safetensors") | tower, served / "model.safetensors", {"format": "pt"})
    images = Lfm2VlImageProcessor(min_image_tokens=4, max_image_tokens=MAX_IMAGE_TOKENS)
    Lfm2VlProcessor(images, words(LFM2_MARKS)).save_pretrained(served)


def add_minicpm_images(served: Path) -> None:
    """Give a saved MiniCPM-V random weights of a vision tower, and a processor that cuts large images into slices."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(served)
    model = AutoModelForImageTextToText.from_config(config, dtype=config.dtype)
    randomize(model)
    tower = {
        key: weight.clone()
        for key, weight in model.state_dict().items()
        if not key.startswith(("model.language_model", "lm_head"))
    }
    save_file(load_file(served / "model.safetensors") | tower, served / "model.safetensors", {"format": "pt"})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words([*MINICPM_MARKS.values()])._tokenizer, eos_token="1", unk_token="0", pad_token="0",
        extra_special_tokens=MINICPM_MARKS,
    )  # fmt: skip
    size = {"patch_size": 4, "scale_resolution": 128}
    images = transformers.MiniCPMV4_6ImageProcessor(max_slice_nums=SLICES, **size)
    videos = transformers.MiniCPMV4_6VideoProcessor(**size)
    processor = {"minicpmv4_6": "MiniCPMV4_6Processor", "minicpmv4_7": "MiniCPMV4_7Processor"}[config.model_type]
    getattr(transformers, processor)(images, videos, tokenizer).save_pretrained(served)


def add_nano_images(served: Path) -> None:
    """Give a saved Nemotron Nano random weights of a RADIO tower and a projector.

    Its folder `images` holds the files for transformers: the same weights, and a processor of images.
    """
    torch.manual_seed(0)
    settings, images = AutoConfig.from_pretrained(served), served / "images"
    tower = settings.vision_config
    config = AutoConfig.for_model(
        "nemotron_h_omni",
        text_config=settings.text_config,
        vision_config={
            **NANO_TOWER,
            "patch_size": tower.patch_size,
            "max_img_size": tower.args["cpe_max_size"],
            "num_cls_tokens": len(tower.args["teachers"]),
            "num_registers": tower.args["register_multiple"] - len(tower.args["teachers"]),
            "video_temporal_patch_size": tower.video_temporal_patch_size,
        },
        vision_hidden_size=settings.vit_hidden_size,
        projector_hidden_size=settings.projector_hidden_size,
        image_token_id=settings.image_token_id,
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    randomize(model)
    with torch.no_grad():  # drawn like the lines of an embedding
        model.vision_model.embeddings.patch_projection.weight.mul_(config.vision_config.patch_dim**-0.5)
    model.save_pretrained(images)  # with the names of published checkpoints, which have no scales of layers
    weights = load_file(images / "model.safetensors")
    weights = {
        key: weight
        for key, weight in weights.items()
        if not key.startswith("language_model") and "layer_scale" not in key
    }
    save_file(load_file(served / "model.safetensors") | weights, served / "model.safetensors", {"format": "pt"})
    (images / "model.safetensors").unlink()
    (images / "model.safetensors").symlink_to("../model.safetensors")
    tokenizer = words(NANO_MARKS)
    tokenizer.save_pretrained(served)
    transformers.NemotronH_Omni_Reasoning_V3Processor(
        transformers.NemotronH_Omni_Reasoning_V3ImageProcessor(
            image_mean=settings.norm_mean, image_std=settings.norm_std, patch_size=settings.patch_size, **NANO_PATCHES
        ),
        transformers.NemotronH_Omni_Reasoning_V3VideoProcessor(),
        tokenizer,
        transformers.Wav2Vec2FeatureExtractor(),  # the processor must have one, and no prompt has sounds
    ).save_pretrained(images)  # fmt: skip


def _qwen(text: str, architecture: str, model_type: str, **changes: Any) -> Composite:
    settings = {"architectures": [architecture], "model_type": model_type}
    return Composite(text, settings, named("model.language_model.", "lm_head."), changes=QWEN | changes)


def _minicpm(version: str) -> Composite:
    ids = dict(zip(MINICPM_MARKS, range(VOCABULARY, VOCABULARY + len(MINICPM_MARKS)), strict=True))
    settings = {
        "architectures": [f"MiniCPMV{version}ForConditionalGeneration"],
        "model_type": f"minicpmv{version}",
        "vision_config": {**TOWER, "num_hidden_layers": 2, "patch_size": 4, "image_size": 64},
        "insert_layer_id": 0,
        "max_slice_nums": SLICES,
        "image_token_id": ids["image_token"],
        "video_token_id": ids["video_token"],
        "newline_id": VOCABULARY + len(ids),  # the tokenizer has none
        "uses_mrope_canvas": version == "4_7",
        **{f"{mark}_id": ids[f"{mark}_token"] for mark in ("image_start", "image_end", "slice_start", "slice_end")},
    }
    return Composite(
        "qwen3_5_text", settings, named("model.language_model.", "lm_head."),
        changes=QWEN | {"vocab_size": VOCABULARY + len(ids) + 1}, add_images=add_minicpm_images,
    )  # fmt: skip


NANO_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NANO_PATCHES = {"min_num_patches": 16, "max_num_patches": 4 * MAX_IMAGE_TOKENS}
"""Nemotron Nano resizes an image of fewer or more patches."""
_NANO: dict[str, Any] = {
    "model_type": NanoConfig.model_type,
    "vision_config": {
        "args": {
            "model": "vit_small_patch16_224",
            # vLLM takes these sizes in place of the named model's.
            **NANO_TOWER,
            "intermediate_size": 128,
            # Both resize position embeddings. Were this `preferred_resolution`, vLLM would cut them for small images.
            "cpe_max_size": 128,
            "register_multiple": 5,
            "cls_token_per_teacher": True,
            "teachers": [{"name": "clip"}, {"name": "dino_v2"}, {"name": "sam", "use_summary": False}],
            **NANO_PATCHES,
        },
        "patch_size": 16,
        "preferred_resolution": [64, 64],
        "video_temporal_patch_size": 2,
    },
    "force_image_size": 32,
    "patch_size": 16,
    "template": "",
    "downsample_ratio": 0.5,
    "use_thumbnail": False,
    "ps_version": "v2",
    "image_tag_type": "internvl",
    "vit_hidden_size": NANO_TOWER["hidden_size"],
    "projector_hidden_size": 48,
    "norm_mean": [0.5, 0.4, 0.3],
    "norm_std": [0.3, 0.2, 0.25],
}
COMPOSITES: dict[str, Composite] = {
    "lfm2_vl": Composite(
        "lfm2",
        {
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "model_type": "lfm2_vl",
            "vision_config": {"model_type": "siglip2_vision_model", "vision_use_head": False, **TOWER},
            "projector_hidden_size": 32,
        },
        named("model.language_model.", "lm_head."),
        changes={"vocab_size": VOCABULARY + len(LFM2_MARKS)},
        add_images=add_lfm2_images,
    ),
    "nemotron_nano_vl": Composite(
        "nemotron_h",
        {"architectures": ["NemotronH_Nano_VL_V2"], **_NANO},
        lambda weights: {f"language_model.{key}": weight for key, weight in weights.items()},
        {**TEXT_ONLY, "skip_tokenizer_init": False},
        changes={"vocab_size": VOCABULARY + len(NANO_MARKS)},
        add_images=add_nano_images,
    ),
    "minicpmv4_6": _minicpm("4_6"),
    "minicpmv4_7": _minicpm("4_7"),
    "interns2_preview": _qwen("qwen3_5_moe_text", "InternS2PreviewForConditionalGeneration", "qwen3_5_moe"),
    "interns2_mobius": _qwen(
        "qwen3_5_moe_text", "InternS2MobiusForConditionalGeneration", "qwen3_5_moe", num_blocks=BANKS
    )._replace(names=as_banks),
}


def save_composite(name: str, directory: Path, **changes: Any) -> Path:
    """Save a model of `COMPOSITES`, and return the folder that vLLM serves."""
    composite = COMPOSITES[name]
    save_tiny_model(composite.text, directory, **changes | composite.changes)
    weights = load_file(directory / "model.safetensors")
    if composite.names is as_banks:
        shared = {bank: weights[key] for key in weights if (bank := bank_of(key))}
        weights = {key: shared[bank_of(key) or key].clone() if bank_of(key) else weights[key] for key in weights}
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    served = directory / "served"
    served.mkdir()
    text = json.loads((directory / "config.json").read_text())
    settings = {"image_token_id": VOCABULARY, "dtype": "float32", **composite.settings, "text_config": text}
    (served / "config.json").write_text(json.dumps(settings))
    save_file(composite.names(weights), served / "model.safetensors", metadata={"format": "pt"})
    words().save_pretrained(served)
    if composite.add_images:
        composite.add_images(served)
    return served


def words(marks: Sequence[str] = MARKS) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the numbers of tokens as words, and these marks after them."""
    tokens = {str(token): token for token in range(VOCABULARY)}
    tokens |= {mark: VOCABULARY + place for place, mark in enumerate(marks)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(marks))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", unk_token="0")


def add_processor(directory: Path) -> None:
    """Give a saved Qwen3.5 the files by which vLLM reads images: vLLM runs its vision tower once at start."""
    path, size = directory / "config.json", {"shortest_edge": SIDE**2, "longest_edge": MAX_IMAGE_TOKENS * SIDE**2}
    path.write_text(json.dumps(json.loads(path.read_text()) | QWEN_TOKENS))
    half = [0.5] * 3  # vLLM normalizes both alike
    images = Qwen2VLImageProcessor(patch_size=16, merge_size=2, size=size, image_mean=half, image_std=half)
    videos = Qwen3VLVideoProcessor(patch_size=16, merge_size=2, size=size)
    Qwen3VLProcessor(images, words(), videos).save_pretrained(directory)
