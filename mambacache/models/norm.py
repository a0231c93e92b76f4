"""Run RMSNorm in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mambacache.kernels import rms_norm


class RMSNorm(nn.Module):
    """Normalises the last dim; `round_normed` rounds before the product with `weight`, [dim] or None."""

    def __init__(self, weight: nn.Parameter | None, eps: float, round_normed: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.round_normed = weight, eps, round_normed

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.eps, round_normed=self.round_normed)


def from_rounding(source: Any) -> RMSNorm:
    """Build `weight * normed.to(dtype)`, as in Llama."""
    return RMSNorm(source.weight, source.variance_epsilon, round_normed=True)


def from_fp32(source: Any) -> RMSNorm:
    """Build `(weight * normed).to(dtype)`, with the product in fp32."""
    return RMSNorm(source.weight, source.variance_epsilon, round_normed=False)


def from_zero_centred(source: Any) -> RMSNorm:
    """Build `((1 + weight) * normed).to(dtype)`, with sum and product in fp32."""
    return RMSNorm(nn.Parameter(1 + source.weight.detach().float(), requires_grad=False), source.eps, False)


def from_weightless(source: Any) -> RMSNorm:
    return RMSNorm(None, source.eps, round_normed=False)


NORMS: dict[str, Callable[[Any], RMSNorm]] = {
    "BambaRMSNorm": from_rounding,
    "FalconH1RMSNorm": from_rounding,
    "FalconMambaRMSNorm": from_rounding,
    "FalconMambaWeightlessRMSNorm": from_weightless,
    "GraniteMoeHybridRMSNorm": from_rounding,
    "JambaRMSNorm": from_rounding,
    "KimiLinearRMSNorm": from_rounding,
    "Lfm2MoeRMSNorm": from_rounding,
    "Lfm2RMSNorm": from_rounding,
    "Mamba2RMSNorm": from_rounding,
    "MambaRMSNorm": from_rounding,
    "NemotronHRMSNorm": from_fp32,
    "OlmoHybridRMSNorm": from_fp32,
    "Qwen3NextRMSNorm": from_zero_centred,
    "Qwen3_5MoeRMSNorm": from_zero_centred,
    "Qwen3_5RMSNorm": from_zero_centred,
    "Zamba2RMSNorm": from_rounding,
}
"""Replacements of norms by class name.

NemotronHRMSNorm follows transformers 5.18, as the model was trained; 5.17 also rounds the normalised value.
"""
