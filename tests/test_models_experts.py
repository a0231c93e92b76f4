"""Check our mixtures of experts against transformers: bits, logits, and the mixtures that are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NemotronHConfig, Qwen3NextConfig
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts, Qwen3NextSparseMoeBlock

from kernel_cases import assert_bitwise, random
from mambacache.kernels import combine_experts
from mambacache.models import experts
from mambacache.models.adapt import load_model, model_skeleton
from runner_driver import Driver, Row
from selection import by_family
from tiny_models import VOCABULARY

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODELS = (
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_next_moe",
)


def experts_module(
    dtype: torch.dtype, num_experts: int = 8, hidden: int = 64, width: int = 32, device: str = "cpu", gate: bool = True
) -> Any:
    """Return the experts of Qwen3-Next or, without a gate, of Nemotron-H, with random weights."""
    shape: dict[str, int] = {"hidden_size": hidden, "moe_intermediate_size": width}
    with torch.device("meta"):
        if gate:
            module: Any = Qwen3NextExperts(Qwen3NextConfig(**shape, num_experts=num_experts))
        else:
            module = NemotronHExperts(NemotronHConfig(**shape, n_routed_experts=num_experts))
    module.to(dtype).to_empty(device=device).requires_grad_(False)
    for seed, weight in enumerate(module.parameters()):
        torch.manual_seed(seed)
        weight.normal_(std=weight.shape[-1] ** -0.5)
    module.config._experts_implementation = experts.EXPERTS
    return module


def layer_input(
    tokens: int, choices: int, num_experts: int, hidden: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, the experts of each token, and their weights."""
    scores, ids = random(tokens, num_experts, seed=1).softmax(-1).topk(choices)
    return random(tokens, hidden, seed=2, dtype=dtype), ids, scores.to(weight_dtype)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "is_served", lambda *_: True)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(
    ("backend", "dtypes"),
    [
        ("reference", (FP32, FP32)),
        ("reference", (BF16, BF16)),
        ("reference", (BF16, FP32)),
        ("reference", (FP16, FP16)),
        ("interpreted", (FP32, FP32)),
        ("interpreted", (FP16, FP16)),
    ],
    indirect=["backend"],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "choices"), [(1, 1), (65, 2), (63, 8)])
def test_a_mixture_equals_transformers(
    tokens: int, choices: int, backend: str, dtypes: tuple[torch.dtype, torch.dtype], gate: bool, served: None
) -> None:
    """The interpreter cannot round to bf16, and its exponential is not torch's."""
    module, inputs = experts_module(dtypes[0], gate=gate), layer_input(tokens, choices, 8, 64, *dtypes)
    expected = grouped_mm_experts_forward(module, *inputs)
    y = module(*inputs)
    assert y.dtype == expected.dtype
    if backend == "reference" and dtypes[0] == dtypes[1] != FP32:
        assert_bitwise(y, expected)
    else:
        ulp = torch.finfo(dtypes[0]).eps
        torch.testing.assert_close(y, expected, rtol=2 * ulp, atol=2 * ulp)


def qwen_block(dtype: torch.dtype, normalize: bool = True, device: str = "cpu", **shape: int) -> Any:
    """Return a block of Qwen3-Next: a router, experts, and an expert that all tokens take."""
    with torch.device("meta"):
        block: Any = Qwen3NextSparseMoeBlock(Qwen3NextConfig(**shape, norm_topk_prob=normalize))
    block.to(dtype).to_empty(device=device).requires_grad_(False)
    for seed, weight in enumerate(block.parameters()):
        torch.manual_seed(seed)
        weight.normal_(std=weight.shape[-1] ** -0.5)
    block.experts.config._experts_implementation = "grouped_mm"
    return block


SMALL = {"hidden_size": 64, "num_experts": 12, "num_experts_per_tok": 4}
SMALL |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_gated_mixture_equals_transformers(backend: str, normalize: bool, ours: bool, served: None) -> None:
    block, x = qwen_block(FP32, normalize, **SMALL), random(1, 37, 64, seed=1, dtype=FP32)
    expected = block(x)
    mixture = experts.MIXTURES["Qwen3NextSparseMoeBlock"](block)
    if ours:
        mixture.experts.config._experts_implementation = experts.EXPERTS
    torch.testing.assert_close(mixture(x), expected, rtol=1e-5, atol=1e-5)


def test_a_mixture_with_a_quantised_gate_is_left_to_transformers() -> None:
    block = qwen_block(FP32, **SMALL)
    block.shared_expert_gate = torch.nn.Sequential(block.shared_expert_gate)
    assert experts.MIXTURES["Qwen3NextSparseMoeBlock"](block) is block


def test_no_token_depends_on_padding(backend: str, served: None) -> None:
    module = experts_module(FP32)
    x, ids, weights = layer_input(40, 2, 8, 64, FP32, FP32)
    expected = module(x, ids, weights)
    x[30:], ids[30:], weights[30:] = torch.nan, 3, torch.nan
    torch.testing.assert_close(module(x, ids, weights)[:30], expected[:30])


@pytest.mark.parametrize("change", [{"has_bias": True}, {"_is_expert_parallel": True}, {}])
def test_other_experts_are_left_to_transformers(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts on a CPU are left to transformers too."""
    module, calls = experts_module(FP32), []
    monkeypatch.setattr(experts, "grouped_mm_experts_forward", lambda *arguments: calls.append(arguments))
    vars(module).update(change)
    inputs = layer_input(3, 2, 8, 64, FP32, FP32)
    module(*inputs)
    assert len(calls) == 1
    assert experts.is_served(module, FakeCuda()) == (not change)


class FakeCuda:
    is_cuda, dtype = True, FP32


@pytest.mark.parametrize("name", by_family(MODELS))
def test_logits_of_models(
    name: str, tiny_model: Callable[[str], Path], served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls, logits = load_model(tiny_model(name)), [], []
    tokens = torch.randint(VOCABULARY, (9,), generator=torch.Generator().manual_seed(0)).tolist()

    def counted(*arguments: Any) -> Tensor:
        calls.append(name)
        return combine_experts(*arguments)

    monkeypatch.setattr(experts, "combine_experts", counted)
    for implementation in ("grouped_mm", experts.EXPERTS):
        assert not calls
        model.module.set_experts_implementation(implementation)
        driver = Driver(model)
        logits.append(driver.logits([Row(driver.add(tokens), len(tokens), all_logits=True)]))
    assert calls
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)


def test_models_take_our_experts(tiny_model: Callable[[str], Path]) -> None:
    for load in (load_model, model_skeleton):
        assert load(tiny_model("qwen3_next_moe")).config._experts_implementation == experts.EXPERTS


def test_transformers_chooses_quantised_experts() -> None:
    known = ALL_FP8_EXPERTS_FUNCTIONS
    assert known.get_interface(experts.EXPERTS, None) is known.get_interface("grouped_mm", None) is not None
