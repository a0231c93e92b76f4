"""The ops around the products of a mixture of experts. They keep to what `api` says of all ops."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import backend
from .checks import ACTIVATION_DTYPES, check_dtype, check_rank, check_shape


def choose_experts(logits: Tensor, choices: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts of each token, the likeliest first, with their probabilities: softmax over all, computed in fp32
    (float64 for float64). With `normalize` these are divided by their sum.

    Shapes: logits [F, num_experts], rows any stride apart; returns weights [F, choices] in the dtype of logits and
    experts int64 [F, choices]. Of equal probabilities the first is taken on a GPU. A row without numbers gives any
    experts, each once, with weights of NaN.
    """
    check_rank("logits", logits, "F, num_experts")
    check_dtype("logits", logits, *ACTIVATION_DTYPES)
    if not 0 < choices <= logits.shape[1]:
        raise ValueError(f"choices is {choices}, but it must be 1 to {logits.shape[1]}, the number of experts.")
    return backend(logits).choose_experts(logits, choices, normalize)


def group_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the slots of a batch, a slot being one choice of one token, by expert and, for the same one, by slot.

    Shapes: experts int64 [F, k], each from 0 to `num_experts` - 1. Returns int32 tensors: [F * k], the token of every
    sorted slot; [F, k], the place of every slot among the sorted ones; [num_experts], where each expert's slots end.
    """
    check_rank("experts", experts, "F, k")
    check_dtype("experts", experts, torch.int64)
    return backend(experts).group_by_expert(experts, num_experts)


def silu_and_mul(x: Tensor) -> Tensor:
    """SiLU of a row's first half times its second (SwiGLU, Shazeer 2020): x [S, 2 * dim] -> [S, dim] in x's dtype.

    Rows may lie any stride apart. SiLU is computed in fp32, and rounded to x's dtype before the product.
    """
    check_rank("x", x, "S, 2 * dim")
    check_dtype("x", x, *ACTIVATION_DTYPES)
    check_shape("x", x, x.shape[0], x.shape[1] // 2 * 2)
    return backend(x).silu_and_mul(x)


def combine_experts(
    rows: Tensor, weights: Tensor, places: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """What each token's experts gave, weighted and summed: out_t = sum_c weights[t, c] rows[places[t, c]].

    Shapes: rows [S, dim], any stride apart; weights [F, k] in their dtype or fp32; places int32 [F, k], as
    `group_by_expert` gives them. Returns [F, dim] in the dtype of rows. A product is rounded to the common dtype of
    rows and weights; the sum, in the order of the choices, is fp32 (float64 for float64) and rounded once.

    With `shared` [F, dim], what an expert of all tokens gave, and its `gate` [F], both in the dtype of rows,
    sigmoid(gate) shared is added; sigmoid, product and sum are rounded each.
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
