"""The ops around a mixture's products, in plain torch and in Triton's interpreter, and the mixture that is made of them
against that of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NemotronHConfig, Qwen3NextConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts

from gpu_cases import DEVICE
from kernel_cases import assert_bitwise, random
from mambacache.kernels import api, combine_experts, gpu, group_by_expert, reference, silu_and_mul
from mambacache.kernels.gpu import experts as gpu_experts
from mambacache.models import experts
from mambacache.models.adapt import load_model
from runner_driver import Driver, Row
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
# tokens, choices of each, experts
BATCHES = [(1, 1, 2), (2, 2, 8), (63, 8, 60), (64, 1, 128), (65, 2, 2), (300, 2, 128), (1, 8, 512)]
CHOSEN: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda ids: ids,
    "one": lambda ids: torch.full_like(ids, 1),
    "even": lambda ids: ids // 2 * 2,
}


@pytest.fixture(
    params=["reference", pytest.param("interpreted", marks=pytest.mark.skipif(DEVICE == "cuda", reason="see test_gpu"))]
)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sends the ops to those in plain torch, or to the GPU's kernels in Triton's interpreter."""
    library = reference if request.param == "reference" else gpu
    monkeypatch.setattr(api, "backend", lambda x: library)
    return request.param


def routing(tokens: int, choices: int, num_experts: int, chosen: str = "any", device: str = "cpu") -> Tensor:
    ids = torch.randint(num_experts, (tokens, choices), generator=torch.Generator().manual_seed(tokens))
    return CHOSEN[chosen](ids).to(device)


def check_grouping(ids: Tensor, num_experts: int) -> None:
    chosen = ids.flatten().tolist()
    order = sorted(range(len(chosen)), key=lambda slot: (chosen[slot], slot))
    tokens, places, offsets = group_by_expert(ids, num_experts)
    assert tokens.dtype == places.dtype == offsets.dtype == torch.int32 and places.shape == ids.shape
    assert tokens.tolist() == [slot // ids.shape[1] for slot in order]
    assert [order[place] for place in places.flatten().tolist()] == [*range(len(chosen))]
    ends = torch.bincount(ids.flatten().cpu(), minlength=num_experts).cumsum(0)
    assert offsets.tolist() == ends.tolist()


@pytest.mark.parametrize("ranked", [gpu_experts.RANKED_SLOTS, 0])
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize(("tokens", "choices", "num_experts"), BATCHES)
def test_slots_are_sorted_by_expert(
    backend: str,
    tokens: int,
    choices: int,
    num_experts: int,
    chosen: str,
    ranked: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_experts, "RANKED_SLOTS", ranked)
    check_grouping(routing(tokens, choices, num_experts, chosen), num_experts)


def test_many_slots(backend: str) -> None:
    check_grouping(routing(513, 8, 60), 60)


def test_choices_of_any_layout(backend: str) -> None:
    check_grouping(routing(5, 40, 8).T, 8)


def check_silu_and_mul(rows: int, width: int, gap: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """In 16 bits the few results that differ do so by one rounding of SiLU's last bit, and one of the product."""
    x = (3 * random(rows, gap + 2 * width, seed=1)).to(device, dtype)[:, gap:]
    actual, expected = silu_and_mul(x), reference.silu_and_mul(x)
    assert actual.dtype == dtype and actual.shape == (rows, width)
    if dtype != FP32:
        assert (actual != expected).float().mean() < 0.01
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * ulp, atol=4 * torch.finfo(dtype).tiny)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(("rows", "width", "gap"), [(1, 512, 0), (63, 24, 0), (64, 24, 8), (300, 7, 3), (3, 1408, 1)])
def test_silu_and_mul(backend: str, rows: int, width: int, gap: int, dtype: torch.dtype) -> None:
    check_silu_and_mul(rows, width, gap, dtype)


def check_combine(
    batch: tuple[int, int], width: int, gap: int, dtypes: tuple[torch.dtype, torch.dtype], device: str = "cpu"
) -> None:
    tokens, choices = batch
    order = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(1))
    rows = random(tokens * choices, gap + width, seed=2, dtype=dtypes[0]).to(device)[:, gap:]
    weights = random(tokens, choices, seed=3).sigmoid().to(device, dtypes[1])
    places = order.view(tokens, choices).int().to(device)
    assert_bitwise(combine_experts(rows, weights, places), reference.combine_experts(rows, weights, places))


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP16, FP16), (FP16, FP32)], ids=str)
@pytest.mark.parametrize(
    ("batch", "width", "gap"), [((1, 1), 2048, 0), ((63, 2), 24, 8), ((65, 8), 100, 3), ((300, 2), 64, 0)]
)
def test_combine(
    backend: str, batch: tuple[int, int], width: int, gap: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    check_combine(batch, width, gap, dtypes)


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (group_by_expert, (torch.zeros(4, dtype=torch.int64), 2), "experts has shape"),
        (group_by_expert, (torch.zeros(4, 2), 2), "experts is float32 where int64 is needed"),
        (silu_and_mul, (torch.zeros(4, 7),), r"x has shape \[4, 7\] where the other arguments need \[4, 6\]"),
        (silu_and_mul, (torch.zeros(4, 6, dtype=torch.int32),), "x is int32"),
        (combine_experts, (torch.zeros(4, 8), torch.zeros(2, 3), torch.zeros(2, 2).int()), "weights has shape"),
        (combine_experts, (torch.zeros(4, 8), torch.zeros(2, 2), torch.zeros(2, 2).long()), "places is int64"),
        (combine_experts, (torch.zeros(4, 8), torch.zeros(2, 2).half(), torch.zeros(2, 2).int()), "weights is float16"),
        (
            combine_experts,
            (torch.zeros(4, 8), torch.zeros(2, 2, device="meta"), torch.zeros(2, 2).int()),
            "are on cpu, meta and cpu: move them to one",
        ),
    ],
)
def test_errors(op: Callable[..., Any], arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op(*arguments)


def experts_module(
    dtype: torch.dtype, num_experts: int = 8, hidden: int = 64, width: int = 32, device: str = "cpu", gate: bool = True
) -> Any:
    """The experts of Qwen3-Next or, without a gate, of Nemotron-H, with random weights."""
    shape: dict[str, int] = {"hidden_size": hidden, "moe_intermediate_size": width}
    with torch.device(device):
        if gate:
            module: Any = Qwen3NextExperts(Qwen3NextConfig(**shape, num_experts=num_experts))
        else:
            module = NemotronHExperts(NemotronHConfig(**shape, n_routed_experts=num_experts))
    module.to(dtype).requires_grad_(False)
    for seed, weight in enumerate(module.parameters()):
        torch.manual_seed(seed)
        weight.normal_(std=weight.shape[-1] ** -0.5)
    module.config._experts_implementation = experts.EXPERTS
    return module


def layer_input(
    tokens: int, choices: int, num_experts: int, hidden: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts of each token and their weights."""
    scores, ids = random(tokens, num_experts, seed=1).softmax(-1).topk(choices)
    return random(tokens, hidden, seed=2, dtype=dtype), ids, scores.to(weight_dtype)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our experts on a CPU, too."""
    monkeypatch.setattr(experts, "is_served", lambda *_: True)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16)], ids=str)
@pytest.mark.parametrize(("tokens", "choices"), [(1, 1), (65, 2), (63, 8)])
def test_a_mixture_is_that_of_transformers(
    tokens: int, choices: int, dtypes: tuple[torch.dtype, torch.dtype], gate: bool, backend: str, served: None
) -> None:
    """The interpreter truncates to bf16, and its exponential is not torch's."""
    if backend == "interpreted" and BF16 in dtypes:
        pytest.skip("the interpreter truncates to bf16")
    module, inputs = experts_module(dtypes[0], gate=gate), layer_input(tokens, choices, 8, 64, *dtypes)
    expected = grouped_mm_experts_forward(module, *inputs)
    y = module(*inputs)
    assert y.dtype == expected.dtype
    if backend == "reference" and dtypes[0] == dtypes[1] != FP32:
        assert_bitwise(y, expected)
    else:
        ulp = torch.finfo(dtypes[0]).eps
        torch.testing.assert_close(y, expected, rtol=2 * ulp, atol=2 * ulp)


def test_what_padding_holds_matters_to_no_token(backend: str, served: None) -> None:
    module = experts_module(FP32)
    x, ids, weights = layer_input(40, 2, 8, 64, FP32, FP32)
    expected = module(x, ids, weights)
    x[30:], ids[30:], weights[30:] = torch.nan, 3, torch.nan
    torch.testing.assert_close(module(x, ids, weights)[:30], expected[:30])


@pytest.mark.parametrize("change", [{"has_bias": True}, {"_is_expert_parallel": True}, {}])
def test_other_experts_are_left_to_transformers(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them on a CPU."""
    module, calls = experts_module(FP32), []
    monkeypatch.setattr(experts, "grouped_mm_experts_forward", lambda *arguments: calls.append(arguments))
    vars(module).update(change)
    inputs = layer_input(3, 2, 8, 64, FP32, FP32)
    module(*inputs)
    assert len(calls) == 1
    assert experts.is_served(module, FakeCuda()) == (not change)


class FakeCuda:
    is_cuda, dtype = True, FP32


@pytest.mark.parametrize("name", MODELS)
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


def test_quantised_experts_keep_their_own_interface(tiny_model: Callable[[str], Path]) -> None:
    config = load_model(tiny_model("qwen3_next_moe")).config
    assert config._experts_implementation == experts.EXPERTS == experts.experts_implementation(config)
    config.quantization_config = {"quant_method": "fp8"}
    assert experts.experts_implementation(config) is None
