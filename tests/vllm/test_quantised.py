"""Quantised checkpoints have the weights of their twins, by vLLM's dequantisers and by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from quantised import AWQ_ORDER, FORMS, nvfp4, pack, round_weights
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.scalar_type import scalar_types
from watched import run

NAMES = ("model.layers.0.mlp.experts.3.down_proj", "model.layers.0.linear_attn.in_proj_qkv")
OTHERS = ("model.layers.0.linear_attn.in_proj_a", "model.layers.0.mlp.gate", "model.embed_tokens")
SHAPES = ((200, 256), (256, 384))


def dequantised(form: str, layer: dict[str, Tensor]) -> Tensor:
    """Return a layer's tensors dequantised, fp32 [out, in]."""
    if form == "block_fp8":
        scales = layer["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        weight = layer["weight"].float()
        return weight * scales[: weight.shape[0], : weight.shape[1]]
    if form == "modelopt_fp8":
        return layer["weight"].float() * layer["weight_scale"]
    if form == "nvfp4":
        scales = layer["weight_scale"], layer["weight_scale_2"]
        return dequantize_to_dtype(layer["weight"], *scales, torch.float32, block_size=16, swizzle=False)
    if form == "mxfp4":
        settings = FORMS[form].settings["config_groups"]["group_0"]
        return MXFP4PackedCompressor.decompress(layer, QuantizationScheme.model_validate(settings))["weight"].float()
    if form == "gptq":
        words = (layer["qweight"], 0), (layer["qzeros"], 1)
        codes, zeros = (unpack_quantized_values_into_int32(each, scalar_types.uint4b8, axis) for each, axis in words)
        groups = layer["g_idx"].long()
        return ((codes - (zeros[groups] + 1)) * layer["scales"].float()[groups]).T
    shifts = torch.tensor([4 * AWQ_ORDER.index(place) for place in range(8)])
    codes, zeros = ((layer[name][..., None] >> shifts & 15).flatten(1) for name in ("qweight", "qzeros"))
    groups = layer["scales"].float().repeat_interleave(128, 0)
    return ((codes - zeros.repeat_interleave(128, 0)) * groups).T


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_checkpoint_and_its_twin_have_the_same_weights(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape) * 0.05 for name, shape in zip(NAMES, SHAPES, strict=True)}
    weights |= {f"{name}.weight": torch.randn(32, 128) for name in OTHERS}
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    round_weights(tmp_path, form)
    twin = load_file(tmp_path / "model.safetensors")
    pack(tmp_path, form)
    packed = load_file(tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    names = NAMES[:1] if form == "gptq" else NAMES  # published GPTQ checkpoints have attention in bf16
    for name in names:
        layer = {key.rpartition(".")[2]: each for key, each in packed.items() if key.startswith(f"{name}.")}
        values = twin[f"{name}.weight"].float()
        assert torch.equal(dequantised(form, layer), values)
        before = weights[f"{name}.weight"].float()
        assert 0 < (values - before).norm() < 0.2 * before.norm()
    others = {*NAMES, *OTHERS} - {*names}
    assert all(torch.equal(packed[f"{name}.weight"], weights[f"{name}.weight"]) for name in others)
    if kept := FORMS[form].unquantised:
        assert others <= {*settings[kept]} and not {*settings[kept]} & {*names}


def test_all_weights_in_nvfp4_have_the_same_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 64) * 0.05
    small, large = (nvfp4(each).tensors for each in (weight, 4 * weight))
    assert torch.equal(small["weight_scale_2"], large["weight_scale_2"])
    assert torch.equal(4 * small["weight_scale"].float(), large["weight_scale"].float())


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_4_bit_weights_in_vllm_give_the_tokens_of_their_twin(form: str, tmp_path: Path) -> None:
    run("packed_run.py", form, tmp_path)
