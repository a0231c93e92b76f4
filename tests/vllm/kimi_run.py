"""A KDA layer of vLLM with our kernels, against transformers' own: `python kimi_run.py kimi_linear DIRECTORY`.

vLLM does not run Kimi-Linear on a CPU: its latent attention reads a weight that the CPU build has packed and dropped.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from watched import LAST_ANSWER

from mambacache.kernels import StatePool
from mambacache.plan import SequenceStep
from mambacache.vllm.layers.kimi_delta_attention import KimiDeltaAttention
from mambacache.vllm.rows import Sender
from mambacache.vllm.step_context import StepContext
from tiny_models import save_tiny_model

KDA = {"head_dim": 16, "num_heads": 3, "short_conv_kernel_size": 4}


def build(config: Any, prefix: str, **changes: Any) -> KimiDeltaAttention:
    hidden = SimpleNamespace(
        hidden_size=config.hidden_size,
        hidden_act="silu",
        rms_norm_eps=config.rms_norm_eps,
        linear_attn_config=KDA | changes,
    )
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32),
        cache_config=SimpleNamespace(mamba_cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        quant_config=None,
        speculative_config=None,
        additional_config={},
    )
    return KimiDeltaAttention(hidden, vllm_config, prefix)


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


def main(name: str, directory: Path) -> None:
    save_tiny_model(name, directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    source = model.model.layers[0].self_attn
    layer = build(model.config, "model.layers.0.self_attn")
    load(layer, source)
    try:
        build(model.config, "model.layers.1.self_attn", gate_lower_bound=-5.0)
    except ValueError as error:
        assert "model.layers.1.self_attn has one of -5.0" in str(error)
    else:
        raise AssertionError("a gate with a lower bound is not refused")

    pools = StatePool([layer.state_tensors()], 8), StatePool([layer.log_tensors()], 4)
    context, sender = StepContext([layer], *pools, 4), Sender()
    hidden = {"a": torch.randn(1, 151, model.config.hidden_size), "b": torch.randn(1, 70, model.config.hidden_size)}
    wanted = {each: source(states)[0] for each, states in hidden.items()}
    padding = torch.full((3, model.config.hidden_size), torch.nan)
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
        output = layer(torch.cat([*inputs, padding]), torch.empty(0))
        context.end()
        assert not output[-3:].any()
        expected = torch.cat([wanted[each.request_id][part] for each, part in zip(rows, parts, strict=True)])
        torch.testing.assert_close(output[:-3], expected, rtol=1e-4, atol=1e-5)
    states = context.pool.buffer.clone()
    assert layer(torch.randn_like(padding), torch.empty(0)).isfinite().all()  # a dummy run stores nothing
    assert torch.equal(states, context.pool.buffer)


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{sys.argv[2]}.store", 0, "gloo")
        initialize_model_parallel(1, 1)
        main(sys.argv[1], Path(sys.argv[2]))
    print(LAST_ANSWER, flush=True)
