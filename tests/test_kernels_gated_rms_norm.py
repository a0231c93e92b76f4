"""Compare gated RMSNorm with the modules of the models that use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from kernel_cases import assert_bitwise, random
from mambacache.kernels import gated_rms_norm

DIM = 96
MODULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_next": (Qwen3NextRMSNormGated(DIM), {}),
    "olmo_hybrid": (OlmoHybridRMSNormGated(DIM), {}),
    "kimi_linear": (KimiLinearRMSNormGated(DIM), {"activation": "sigmoid", "round_normed": False}),
    "mamba2": (Zamba2RMSNormGated(DIM, group_size=24), {"norm_before_gate": False, "group_size": 24}),
    "falcon_h1": (FalconH1RMSNormGated(DIM, n_groups=2), {"group_size": 48, "round_normed": False}),
    "falcon_h1_gate_first": (
        FalconH1RMSNormGated(DIM, n_groups=2, norm_before_gate=False),
        {"norm_before_gate": False, "group_size": 48, "round_normed": False},
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_module_with_its_rounding_points(name: str, dtype: torch.dtype) -> None:
    """In 16 bits almost every output equals the module's to the last bit. Another rounding point would change many."""
    module, options = MODULES[name]
    module = module.to(dtype)
    with torch.no_grad():
        module.weight.copy_(1 + 0.3 * random(DIM, seed=1))
        x, gate = random(50, DIM, seed=2, dtype=dtype) * 3, random(50, DIM, seed=3, dtype=dtype) * 3
        expected = module(x, gate)
        actual = gated_rms_norm(x, gate, module.weight, module.variance_epsilon, **options)
    assert actual.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    else:
        assert (actual != expected).float().mean() < 0.01
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [options for _, options in MODULES.values()], ids=MODULES.keys())
def test_a_token_does_not_depend_on_its_batch_or_strides(dtype: torch.dtype, options: dict[str, Any]) -> None:
    wide = random(700, 3 * DIM, seed=4, dtype=dtype)
    x, gate = wide[:, :DIM], wide[:, DIM : 2 * DIM]
    weight = random(DIM, seed=5, dtype=dtype)
    whole = gated_rms_norm(x, gate, weight, 1e-6, **options)
    for start, stop in ((0, 1), (3, 4), (5, 700), (130, 197)):
        alone = gated_rms_norm(x[start:stop].clone(), gate[start:stop].clone(), weight, 1e-6, **options)
        assert_bitwise(whole[start:stop], alone)


def test_a_vector_counts_as_a_token(device: str = "cpu") -> None:
    x, gate, weight = (
        random(*shape, seed=i).to(device, torch.float32) for i, shape in enumerate([(3, DIM)] * 2 + [(DIM,)])
    )
    for group_size in (None, 24):
        whole = gated_rms_norm(x, gate, weight, 1e-6, group_size=group_size)
        assert_bitwise(gated_rms_norm(x[1], gate[1], weight, 1e-6, group_size=group_size), whole[1])


def test_float64_is_computed_in_float64() -> None:
    x, gate, weight = random(5, 2, DIM, seed=1), random(5, 2, DIM, seed=2), random(DIM, seed=3)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = normed * weight * gate * gate.sigmoid()
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-5), expected, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": torch.zeros(4, 8)}, r"gate has shape \[4, 8\]"),
        ({"weight": torch.zeros(8)}, r"weight has shape \[8\]"),
        ({"activation": "relu"}, "activation is 'relu'"),
        ({"group_size": 7}, "group_size is 7, but it must divide the width 16"),
        ({"x": torch.zeros(4, 16, dtype=torch.int32)}, "x is int32"),
        ({"gate": torch.zeros(4, 16, device="meta")}, "x, gate and weight are on cpu, meta and cpu: move them to one"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(4, 16),
        "gate": torch.zeros(4, 16),
        "weight": torch.ones(16),
        "eps": 1e-6,
    } | change
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**arguments)
