"""Run transformers' mixtures of experts in few launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import grouped_mm, linear, silu
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface, fp8_grouped_mm_experts_forward
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from mambacache.kernels import choose_experts, combine_experts, group_by_expert, silu_and_mul

EXPERTS = "mambacache"
"""Name in transformers' interfaces of experts; FP8 weights run by transformers' default."""

DEFAULT_GATE = getattr(moe, "_default_apply_gate", None)
"""Gate of transformers: activation of the first half, times the second."""

ROUND_LOGITS = 8
"""Multiple to pad router logits to, since other widths run a slower kernel."""

OTHER_LAYOUTS = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
"""Attributes of unsupported features, absent in some releases of transformers."""


def forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *shared: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [F, dim].

    For k up to 4, 16-bit results are bitwise equal to transformers' `grouped_mm_experts_forward`.

    Args:
        hidden_states: [F, dim].
        top_k_index: int64 [F, k].
        top_k_weights: [F, k].
        shared: output and gate of a shared expert; only if `is_served`.
    """
    if not is_served(module, hidden_states):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    tokens, places, offsets = group_by_expert(top_k_index, module.num_experts)
    weight = module.gate_up_proj if module.has_gate else module.up_proj
    rows = grouped_mm(hidden_states.index_select(0, tokens), weight.transpose(1, 2), offs=offsets)
    if not module.has_gate:
        rows = module.act_fn(rows)
    elif _is_silu(module.act_fn) and type(module)._apply_gate is DEFAULT_GATE:
        rows = silu_and_mul(rows)
    else:
        rows = module._apply_gate(rows)
    rows = grouped_mm(rows, module.down_proj.transpose(1, 2), offs=offsets)
    return combine_experts(rows, top_k_weights, places, *shared)


def is_served(module: Any, hidden_states: torch.Tensor) -> bool:
    """Return whether `forward` runs its kernels."""
    plain = not any(getattr(module, name, False) for name in OTHER_LAYOUTS)
    return plain and hidden_states.is_cuda and module.down_proj.dtype == hidden_states.dtype


def _is_silu(activation: Any) -> bool:
    return activation is silu or isinstance(activation, (nn.SiLU, SiLUActivation))


class GatedMixture(nn.Module):
    """Runs a mixture of experts plus a sigmoid-gated shared expert."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.experts, self.shared_expert = source.experts, source.shared_expert
        self.choices, self.normalize = source.gate.top_k, getattr(source.gate, "norm_topk_prob", True)
        logits = [source.gate.weight.detach(), source.shared_expert_gate.weight.detach()]
        self.num_experts = len(logits[0])
        padding = -(self.num_experts + 1) % ROUND_LOGITS
        weight = torch.cat([*logits, logits[0].new_zeros(padding, logits[0].shape[1])])
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)
        logits = linear(x, self.weight)
        weights, chosen = choose_experts(logits[:, : self.num_experts], self.choices, normalize=self.normalize)
        shared, gate = self.shared_expert(x), logits[:, self.num_experts]
        if self.experts.config._experts_implementation == EXPERTS and is_served(self.experts, x):
            y = forward(self.experts, x, chosen, weights, shared, gate)
        else:
            y = self.experts(x, chosen, weights) + gate.sigmoid()[:, None] * shared
        return y.view_as(hidden_states)


def from_qwen(source: Any) -> nn.Module:
    gate = source.shared_expert_gate
    return GatedMixture(source) if type(gate) is nn.Linear and gate.weight.dtype == source.gate.weight.dtype else source


MIXTURES: dict[str, Callable[[Any], nn.Module]] = {
    "Qwen3NextSparseMoeBlock": from_qwen,
    "Qwen3_5MoeSparseMoeBlock": from_qwen,
}
"""Replacements of mixtures by class name."""

ExpertsInterface.register(EXPERTS, forward)
FP8ExpertsInterface.register(EXPERTS, fp8_grouped_mm_experts_forward)
