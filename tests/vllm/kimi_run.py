"""Compare vLLM's KDA layer on our kernels with transformers' layer: `python kimi_run.py NAME DIRECTORY`.

NAME is `kimi_linear`, or `alice_ai`, which names the layer's sizes otherwise. vLLM runs neither on a CPU. The latent
attention of Kimi-Linear reads a weight that the CPU build has packed and dropped, and AliceAI is newer than that build.
On a GPU the layer has real sizes, and its bf16 error is compared with the bf16 error of transformers' layer.
"""

from __future__ import annotations

import ast
import sys
from copy import copy, deepcopy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.utils.torch_utils import set_default_torch_dtype
from watched import LAST_ANSWER

from mambacache.kernels import StatePool
from mambacache.plan import SequenceStep
from mambacache.vllm.layers.kimi_delta_attention import KimiDeltaAttention
from mambacache.vllm.rows import Sender
from mambacache.vllm.step_context import StepContext
from tiny_models import save_tiny_model

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
SIZES = {"hidden_size": 2304, "linear_head_dim": 128, "linear_num_heads": 32} if CUDA else {}
RATIO = 1.2
SOURCES = Path(find_spec("vllm").origin).parent, Path(__file__).resolve().parents[2] / "build" / "vllm-0.33.0" / "vllm"


def settings_of(config: Any, **changes: Any) -> Any:
    """Return Kimi-Linear's settings as vLLM reads them."""
    kda = {"head_dim": config.linear_head_dim, "num_heads": config.linear_num_heads}
    return SimpleNamespace(
        hidden_size=config.hidden_size,
        hidden_act="silu",
        rms_norm_eps=config.rms_norm_eps,
        linear_attn_config={**kda, "short_conv_kernel_size": config.linear_conv_kernel_dim, **changes},
    )


def alice_settings_of(config: Any) -> Any:
    """Return AliceAI's settings as vLLM's function hands them to the layer. Its file cannot be imported on a CPU."""
    file = next(path for folder in SOURCES if (path := folder / "model_executor/models/alice_ai.py").exists())
    tree = ast.parse(file.read_text())
    wanted = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "_make_kimi_kda_config"]
    names: dict[str, Any] = {"copy": copy, "cast": cast, "PreTrainedConfig": Any, "KimiLinearConfig": Any}
    exec(compile(ast.Module(wanted, []), file.name, "exec"), names)
    heads, size = config.linear_num_heads, config.linear_head_dim
    flat = SimpleNamespace(
        hidden_size=config.hidden_size,
        hidden_act="silu",
        rms_norm_eps=config.rms_norm_eps,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        linear_conv_kernel_dim=config.linear_conv_kernel_dim,
    )
    return names["_make_kimi_kda_config"](flat)


def build(settings: Any, prefix: str) -> KimiDeltaAttention:
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=DTYPE),
        cache_config=SimpleNamespace(mamba_cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        quant_config=None,
        speculative_config=None,
        additional_config={},
    )
    with torch.device(DEVICE), set_default_torch_dtype(DTYPE):
        return KimiDeltaAttention(settings, vllm_config, prefix)


def load(layer: Any, source: Any) -> None:
    decay = source.forget_gate
    joined = [source.q_proj, source.k_proj, source.v_proj, source.b_proj, decay.f_a_proj]
    for name, weight in {
        "in_proj_qkvgfab.weight": torch.cat([each.weight for each in joined]),
        "f_b_proj.weight": decay.f_b_proj.weight,
        "dt_bias": decay.dt_bias,
        "A_log": decay.A_log.flatten(),
        "conv1d.weight": source.conv1d.weight,
        "g_a_proj.weight": source.g_a_proj.weight,
        "g_b_proj.weight": source.g_b_proj.weight,
        "o_norm.weight": source.o_norm.weight,
        "o_proj.weight": source.o_proj.weight,
    }.items():
        layer.get_parameter(name).data.copy_(weight.view(layer.get_parameter(name).shape))
    for module in layer.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def row(name: str, start: int, end: int, src: int, dst: int) -> SequenceStep:
    slot, prefill = ("ab".index(name) + 1, False) if end - start == 1 else (0, True)
    return SequenceStep(name, 0, 0, start, end - start, prefill, True, src, dst, slot, start % 16 if slot else 0)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).pow(2).mean().sqrt().item()


def main(name: str, directory: Path) -> None:
    save_tiny_model("kimi_linear", directory, **SIZES)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(DEVICE).eval()
    source = model.model.layers[0].self_attn
    settings = {"kimi_linear": settings_of, "alice_ai": alice_settings_of}[name](model.config)
    layer = build(settings, "model.layers.0.self_attn")
    load(layer, source)
    try:
        build(settings_of(model.config, gate_lower_bound=-5.0), "model.layers.1.self_attn")
    except ValueError as error_:
        assert "model.layers.1.self_attn has one of -5.0" in str(error_)
    else:
        raise AssertionError("a gate with a lower bound is not refused")

    pools = StatePool([layer.state_tensors()], 8, DEVICE), StatePool([layer.log_tensors()], 4, DEVICE)
    context, sender = StepContext([layer], *pools, 4), Sender()
    size, rounded = model.config.hidden_size, deepcopy(source).to(DTYPE)
    hidden = {each: torch.randn(1, count, size).to(DEVICE, DTYPE) for each, count in (("a", 151), ("b", 70))}
    wanted = {each: source(states.float())[0] for each, states in hidden.items()}
    allowed = max(error(rounded(states)[0].float(), wanted[each]) for each, states in hidden.items())
    padding = torch.full((3, size), torch.nan).to(DEVICE, DTYPE)
    for rows in (
        [row("a", 0, 100, 0, 1)],
        [row("a", 100, 149, 1, 2)],
        [row("a", 149, 150, 2, 3), row("b", 0, 70, 0, 4)],
        [row("a", 150, 151, 3, 3)],
    ):
        context.receive(sender.columns(rows, []), [])
        context.begin([each.request_id for each in rows], np.array([each.num_tokens for each in rows]))
        parts = [slice(each.start, each.start + each.num_tokens) for each in rows]
        inputs = [hidden[each.request_id][0, part] for each, part in zip(rows, parts, strict=True)]
        output = layer(torch.cat([*inputs, padding]), torch.empty(0)).float()
        context.end()
        assert not output[-3:].any()
        expected = torch.cat([wanted[each.request_id][part] for each, part in zip(rows, parts, strict=True)])
        if CUDA:
            assert error(output[:-3], expected) <= RATIO * allowed, (error(output[:-3], expected), allowed)
        else:
            torch.testing.assert_close(output[:-3], expected, rtol=1e-4, atol=1e-5)
    states = context.pool.buffer.clone()
    assert layer(torch.randn_like(padding), torch.empty(0)).isfinite().all()  # a dummy run stores nothing
    assert torch.equal(states, context.pool.buffer)


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{sys.argv[2]}.store", 0, "nccl" if CUDA else "gloo")
        initialize_model_parallel(1, 1)
        main(sys.argv[1], Path(sys.argv[2]))
    print(LAST_ANSWER, flush=True)
