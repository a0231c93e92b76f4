"""Implement the ops of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import silu, wide_dtype


def choose_experts(logits: Tensor, choices: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `mambacache.kernels.choose_experts`."""
    weights, experts = logits.softmax(-1, dtype=wide_dtype(logits)).topk(choices)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), experts


def group_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `mambacache.kernels.group_by_expert`."""
    ids = experts.flatten()
    order = ids.argsort(stable=True)
    places = torch.empty_like(ids, dtype=torch.int32)
    places[order] = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
    ends = torch.searchsorted(ids[order], torch.arange(num_experts, device=ids.device), right=True, out_int32=True)
    return (order // experts.shape[1]).int(), places.view(experts.shape), ends


def silu_and_mul(x: Tensor) -> Tensor:
    """See `mambacache.kernels.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate.to(wide_dtype(x))).to(x.dtype) * up


def combine_experts(
    rows: Tensor, weights: Tensor, places: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """See `mambacache.kernels.combine_experts`."""
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=wide_dtype(rows), device=rows.device)
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        total += rows[place] * weight[:, None]
    out = total.to(rows.dtype)
    return out if shared is None or gate is None else out + gate.sigmoid()[:, None] * shared
