"""Make small checkpoints with quantised weights, in the layouts of published checkpoints.

All scales are powers of two, so the quantised values are exact in bf16 and in fp32. A twin checkpoint in bf16 has the
same weights: `round_weights` makes the twin, and `pack` the quantised checkpoint.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LAYERS += ("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj", "w1", "w2", "w3")
"""Linear layers with these last names are quantised: no router, no gate of a recurrent layer, no output layer."""
UNQUANTISED = {"lm_head", "mtp.fc", "visual", "model.visual*", "re:.*visual.*"}
"""These layers are in bf16. A checkpoint of the text part alone does not have them."""
FP8 = torch.float8_e4m3fn
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Three bits stand for these values. The fourth bit is the sign."""
BLOCK, GROUP, NVFP4_GROUP, MXFP4_GROUP = 128, 128, 16, 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Each of eight output channels has this place in a word of AWQ."""
NVFP4_SCALE = 2.0**-10
"""This is the scale of whole weights in NVFP4. It is the same for all, since vLLM takes a single scale for layers that
it fuses.

Weights up to 1.5 fit.
"""
INPUT_SCALE = 2.0**-3
"""This is the static scale of activations in FP8. It holds values up to 56."""


def power_of_two(largest: Tensor, most: float) -> Tensor:
    """Return the least powers of two that divide values up to `largest` to `most` at most."""
    return torch.exp2((largest.clamp(min=2.0**-20) / most).log2().ceil())


def by_block(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Return the largest absolute value of each block, [ceil(out / rows), ceil(in / columns)]."""
    padded = torch.nn.functional.pad(weight.abs(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))


def spread(scales: Tensor, rows: int, columns: int, like: Tensor) -> Tensor:
    """Return the scale of each value of a weight [out, in]."""
    whole = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return whole[: like.shape[0], : like.shape[1]]


def as_fp4(values: Tensor) -> Tensor:
    """Return the codes, uint8 from 0 to 15, of the FP4 values that are nearest."""
    nearest = torch.bucketize(values.abs(), (FP4[1:] + FP4[:-1]) / 2)
    return (nearest + 8 * (values < 0)).to(torch.uint8)


def from_fp4(codes: Tensor) -> Tensor:
    return FP4[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())


def in_bytes(codes: Tensor) -> Tensor:
    """Return codes of 4 bits, uint8 [n, 2 m], in bytes, uint8 [n, m], the first of two in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def in_words(codes: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Return codes of 4 bits [n, 8 m] in words of 32 bits, int32 [n, m]; `order` goes from the low end."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int32)
    for place, code in enumerate(order):
        words |= codes[:, code::8].to(torch.int32) << 4 * place
    return words


class Quantised(NamedTuple):
    """Hold a weight [out, in] in a form.

    Attributes:
        tensors: the checkpoint's tensors, by the rest of the name after the layer's.
        values: fp32 [out, in], the values that they stand for.
    """

    tensors: dict[str, Tensor]
    values: Tensor


def block_fp8(weight: Tensor) -> Quantised:
    scales = power_of_two(by_block(weight, BLOCK, BLOCK), 448.0)
    each = spread(scales, BLOCK, BLOCK, weight)
    quantised = (weight / each).to(FP8)
    return Quantised({"weight": quantised, "weight_scale_inv": scales}, quantised.float() * each)


def modelopt_fp8(weight: Tensor) -> Quantised:
    scale = power_of_two(weight.abs().max(), 448.0)
    quantised = (weight / scale).to(FP8)
    tensors = {"weight": quantised, "weight_scale": scale, "input_scale": torch.tensor(INPUT_SCALE)}
    return Quantised(tensors, quantised.float() * scale)


def nvfp4(weight: Tensor) -> Quantised:
    """Quantise with two scales: one of the whole weight, and one in FP8 for each 16 values of an output channel."""
    largest = by_block(weight, 1, NVFP4_GROUP) / NVFP4_SCALE
    scales = power_of_two(largest, 6.0).clamp(min=2.0**-6, max=2.0**8)
    each = spread(scales, 1, NVFP4_GROUP, weight) * NVFP4_SCALE
    codes = as_fp4(weight / each)
    tensors = {
        "weight": in_bytes(codes),
        "weight_scale": scales.to(FP8),
        "weight_scale_2": torch.tensor(NVFP4_SCALE),
        "input_scale": torch.tensor(INPUT_SCALE / 6),
    }
    return Quantised(tensors, from_fp4(codes) * each)


def mxfp4(weight: Tensor) -> Quantised:
    """Quantise with a scale for each 32 values of an output channel, and store its exponent in a byte."""
    scales = power_of_two(by_block(weight, 1, MXFP4_GROUP), 6.0)
    each = spread(scales, 1, MXFP4_GROUP, weight)
    codes = as_fp4(weight / each)
    tensors = {"weight_packed": in_bytes(codes), "weight_scale": (scales.log2() + 127).to(torch.uint8)}
    return Quantised(tensors, from_fp4(codes) * each)


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes from 0 to 15 with zero at 8 [out, in], scales of groups [out, in / 128], and the values."""
    scales = power_of_two(by_block(weight, 1, GROUP), 7.0)
    each = spread(scales, 1, GROUP, weight)
    codes = (weight / each).round().clamp(-8, 7) + 8
    return codes, scales, (codes - 8) * each


def awq(weight: Tensor) -> Quantised:
    """Put eight output channels of an input channel in a word."""
    codes, scales, values = four_bits(weight)
    tensors = {
        "qweight": in_words(codes.T, AWQ_ORDER),
        "qzeros": in_words(torch.full_like(scales.T, 8), AWQ_ORDER),
        "scales": scales.T.to(torch.float16),
    }
    return Quantised(tensors, values)


def gptq(weight: Tensor) -> Quantised:
    """Put eight input channels of an output channel in a word. Zero points are stored minus 1."""
    codes, scales, values = four_bits(weight)
    tensors = {
        "qweight": in_words(codes).T,
        "qzeros": in_words(torch.full_like(scales.T, 8 - 1)),
        "scales": scales.T.to(torch.float16),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return Quantised(tensors, values)


class Form(NamedTuple):
    """Describe a form of quantised weights.

    Attributes:
        quantise: the function of a weight.
        settings: the settings of a checkpoint.
        unquantised: the setting that lists the layers that stay in bf16.
        rules: the regular expressions of layers that published checkpoints leave in bf16.
    """

    quantise: Callable[[Tensor], Quantised]
    settings: dict[str, Any]
    unquantised: str | None
    rules: tuple[str, ...] = ()


MXFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": MXFP4_GROUP,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
}
GPTQ_RULES = (".*attn.*", ".*shared_expert.*", ".*mtp.*", ".*visual.*")
FORMS = {
    "block_fp8": Form(
        block_fp8,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        "modules_to_not_convert",
    ),
    "modelopt_fp8": Form(modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}, "ignore"),
    "nvfp4": Form(nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": NVFP4_GROUP}, "ignore"),
    "mxfp4": Form(
        mxfp4,
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": MXFP4_WEIGHTS, "input_activations": None}},
        },
        "ignore",
    ),
    "awq": Form(
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        "modules_to_not_convert",
    ),
    "gptq": Form(
        gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "desc_act": False,
            "checkpoint_format": "gptq",
            "lm_head": False,
            "dynamic": {f"-:{rule}": {} for rule in GPTQ_RULES},
        },
        None,
        GPTQ_RULES,
    ),
}


def layers(weights: dict[str, Tensor], form: str) -> Iterator[str]:
    """Yield the names of all quantised layers of a checkpoint."""
    for key, weight in weights.items():
        layer, _, kind = key.rpartition(".")
        left = any(re.match(rule, layer) for rule in FORMS[form].rules)
        if kind == "weight" and weight.dim() == 2 and layer.rpartition(".")[2] in LAYERS and not left:
            yield layer


def round_weights(directory: Path, form: str) -> None:
    """Round the weights of a checkpoint in bf16 to the values of a form."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    for layer in list(layers(weights, form)):
        weight = weights[f"{layer}.weight"]
        weights[f"{layer}.weight"] = FORMS[form].quantise(weight.float()).values.to(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})


def pack(directory: Path, form: str) -> None:
    """Quantise a checkpoint of rounded weights."""
    quantise, settings, unquantised, _ = FORMS[form]
    path, config = directory / "model.safetensors", directory / "config.json"
    weights = load_file(path)
    chosen = list(layers(weights, form))
    kept = {key.removesuffix(".weight") for key, weight in weights.items() if weight.dim() >= 2} - {*chosen}
    for layer in chosen:
        found = quantise(weights.pop(f"{layer}.weight").float())
        weights |= {f"{layer}.{name}": tensor.contiguous() for name, tensor in found.tensors.items()}
    save_file(weights, path, metadata={"format": "pt"})
    if unquantised is not None:
        settings = settings | {unquantised: sorted(kept | UNQUANTISED)}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
