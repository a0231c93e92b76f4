"""What a mixture of experts does around its products, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import silu


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
    return silu(gate.to(_wide(x))).to(x.dtype) * up


def combine_experts(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """See `mambacache.kernels.combine_experts`."""
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=_wide(rows), device=rows.device)
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        total += rows[place] * weight[:, None]
    return total.to(rows.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
