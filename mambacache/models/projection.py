"""Merge linears over one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class JoinedLinears(nn.Module):
    """Calls linears that cannot be merged."""

    order: torch.Tensor | None

    def __init__(self, linears: Sequence[nn.Module], order: torch.Tensor | None) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.register_buffer("order", order, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([linear(x) for linear in self.linears], dim=-1)
        return y if self.order is None else y.index_select(-1, self.order)


class ScaledLinear(nn.Module):
    outputs: torch.Tensor

    def __init__(self, linear: nn.Module, inputs: float, outputs: torch.Tensor) -> None:
        super().__init__()
        self.linear, self.inputs = linear, inputs
        self.register_buffer("outputs", outputs, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.inputs) * self.outputs.to(x.dtype)


def fuse(linears: Sequence[nn.Module], order: torch.Tensor | None = None) -> nn.Module:
    """Concatenate the outputs of `linears`, in `order`; merge plain linears without bias."""
    plain: list[Any] = [linear for linear in linears if type(linear) is nn.Linear and linear.bias is None]
    if len(plain) < len(linears):
        return JoinedLinears(linears, order)
    weight = torch.cat([linear.weight.detach() for linear in plain])
    if order is not None:
        weight = weight[order.to(weight.device)]
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    fused.weight = nn.Parameter(weight, requires_grad=False)
    return fused


def without_bias(linear: Any) -> tuple[nn.Module, nn.Parameter | None]:
    """Return a plain linear without its bias, and the bias, for addition in fp32."""
    if type(linear) is not nn.Linear:
        return linear, None
    bare = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    bare.weight = linear.weight
    return bare, linear.bias


def scale(linear: Any, inputs: float, outputs: torch.Tensor) -> nn.Module:
    """Return a module for `linear(inputs * x) * outputs`."""
    if type(linear) is not nn.Linear:
        return ScaledLinear(linear, inputs, outputs)
    scaled = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    weight, factors = linear.weight.detach(), outputs.float()
    scaled.weight = nn.Parameter((weight * (inputs * factors)[:, None]).to(weight.dtype), requires_grad=False)
    if linear.bias is not None:
        scaled.bias = nn.Parameter((linear.bias.detach() * factors).to(weight.dtype), requires_grad=False)
    return scaled
