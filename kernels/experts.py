"""Define the ops of a mixture of experts, with the conventions of `api`."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import backend
from .checks import ACTIVATION_DTYPES, check_dtype, check_rank, check_shape


def choose_experts(logits: Tensor, choices: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return each token's likeliest experts first, with probabilities from a softmax over all.

    Shapes: logits [F, num_experts], any stride between tokens. Returns weights [F, choices] in their dtype, experts
    int64 [F, choices]. `normalize` divides weights by their sum. A GPU takes the first of equal probabilities; NaN
    logits give distinct experts and NaN weights.
    """
    check_rank("logits", logits, "F, num_experts")
    check_dtype("logits", logits, *ACTIVATION_DTYPES)
    if not 0 < choices <= logits.shape[1]:
        raise ValueError(f"choices is {choices}, but it must be 1 to {logits.shape[1]}, the number of experts.")
    return backend(logits).choose_experts(logits, choices, normalize)


def group_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort slots, one per token and choice, by expert, then by slot.

    Shapes: experts int64 [F, k] below `num_experts`. Returns int32: sorted slots' tokens [F * k], slots' places [F, k],
    ends of experts' slots [num_experts].
    """
    check_rank("experts", experts, "F, k")
    check_dtype("experts", experts, torch.int64)
    return backend(experts).group_by_expert(experts, num_experts)


def silu_and_mul(x: Tensor) -> Tensor:
    """Multiply SiLU of a token's first half, rounded, by its second half (SwiGLU, Shazeer 2020).

    Shapes: x [S, 2 * dim], any stride between tokens. Returns [S, dim].
    """
    check_rank("x", x, "S, 2 * dim")
    check_dtype("x", x, *ACTIVATION_DTYPES)
    check_shape("x", x, x.shape[0], x.shape[1] // 2 * 2)
    return backend(x).silu_and_mul(x)


def combine_experts(
    rows: Tensor, weights: Tensor, places: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """Sum weighted results of experts: out_t = sum_c weights[t, c] rows[places[t, c]].

    Shapes: rows [S, dim], any stride apart; weights [F, k] in their dtype or fp32; places int32 [F, k] from
    `group_by_expert`. Returns [F, dim] like rows. Products are rounded to the common dtype, and their sum, in the order
    of choices, once. `shared` [F, dim] and `gate` [F], like rows, add sigmoid(gate) shared, each operation rounded.
    """
    check_rank("rows", rows, "S, dim")
    check_rank("places", places, "F, k")
    check_shape("weights", weights, *places.shape)
    check_dtype("rows", rows, *ACTIVATION_DTYPES)
    check_dtype("weights", weights, rows.dtype, torch.float32)
    check_dtype("places", places, torch.int32)
    if shared is not None and gate is not None:
        check_shape("shared", shared, places.shape[0], rows.shape[1])
        check_shape("gate", gate, places.shape[0])
        check_dtype("shared", shared, rows.dtype)
        check_dtype("gate", gate, rows.dtype)
    elif shared is not None or gate is not None:
        raise ValueError("shared and gate belong together: give both, or none.")
    given = {"rows": rows, "weights": weights, "places": places, "shared": shared, "gate": gate}
    devices = {name: str(x.device) for name, x in given.items() if x is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{', '.join(devices)} are on {', '.join(devices.values())}: move them to one device.")
    return backend(rows).combine_experts(rows, weights, places, shared, gate)
