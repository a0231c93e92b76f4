"""Mixtures of experts of transformers' models, in few launches around their products by expert."""

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
"""The name under which `forward` is registered in transformers' interface of experts. In that of FP8 weights it stands
for what transformers would choose."""

DEFAULT_GATE = getattr(moe, "_default_apply_gate", None)
"""What modules do with the two halves unless they say otherwise: the activation of the first, times the second."""

ROUND_LOGITS = 8
"""Logits of a token, padded to a multiple of it: products of other widths take another, slower kernel."""

OTHER_LAYOUTS = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
"""What a module of experts may have and ours knows not. Releases of transformers lack some."""


def forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *shared: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of what each token's experts make of it, as transformers' `grouped_mm_experts_forward` gives it.

    Values are rounded where they are there, so that 16-bit results are the same to the last bit, but for sums of more
    than four terms, which are added in another order.

    Args:
        hidden_states: [F, dim].
        top_k_index: int64 [F, k], the experts of each token; top_k_weights: [F, k].
        shared: of a module that ours serves, what `combine_experts` adds, and its gate.

    Returns:
        [F, dim].
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
    """Whether ours serves a call: on a GPU, for plain weights in the dtype of activations. (On a CPU launches cost
    little, and what transformers does is done by several threads.)"""
    plain = not any(getattr(module, name, False) for name in OTHER_LAYOUTS)
    return plain and hidden_states.is_cuda and module.down_proj.dtype == hidden_states.dtype


def _is_silu(activation: Any) -> bool:
    return activation is silu or isinstance(activation, (nn.SiLU, SiLUActivation))


class GatedMixture(nn.Module):
    """A mixture of experts beside one that all tokens take, times the sigmoid of a gate of its own, as Qwen's are.

    Args:
        source: the module of transformers, whose parameters it takes over: router and gate become one product.
    """

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
        """hidden_states [1, F, dim] -> [1, F, dim]."""
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
    """The module itself where its gate is not a plain linear like the router, as in a quantised checkpoint."""
    gate = source.shared_expert_gate
    return GatedMixture(source) if type(gate) is nn.Linear and gate.weight.dtype == source.gate.weight.dtype else source


MIXTURES: dict[str, Callable[[Any], nn.Module]] = {
    "Qwen3NextSparseMoeBlock": from_qwen,
    "Qwen3_5MoeSparseMoeBlock": from_qwen,
}
"""How mixtures of transformers are replaced; one that is not here stays as it is, but for its experts."""

ExpertsInterface.register(EXPERTS, forward)
FP8ExpertsInterface.register(EXPERTS, fp8_grouped_mm_experts_forward)
