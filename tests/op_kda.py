"""Kimi Delta Attention as the tests of the ops see it: the gated delta rule's oracle with a decay for every channel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kernel_cases import Inputs, random
from mambacache.kernels import StateTensor, kda_log
from op_gated_delta_rule import SPOILS, DeltaRuleOp, harden


class KDAOp(DeltaRuleOp):
    name = "kda"
    gate = "g"

    def __init__(self, heads: int = 2, key_width: int = 32, value_width: int = 16) -> None:
        super().__init__(heads, heads, key_width, value_width)
        self.parameters = {"A_log": random(heads, seed=3), "dt_bias": random(heads, key_width, seed=4)}

    def log_layout(self, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        heads, value_width, key_width = self.state_shape
        return kda_log(heads, key_width, value_width, dtype, state_dtype)


def uneven_decay(inputs: Inputs, gate: str) -> None:
    """Strong decay in one channel of some blocks of 16 tokens: in one block of some chunks, in none of others."""
    inputs[gate][torch.arange(len(inputs[gate])) // 16 % 6 == 5, :, 0] = 50


def every_decay(inputs: Inputs, gate: str) -> None:
    """Log decays from -50 to 0, evenly."""
    inputs[gate] = (50 * torch.rand(inputs[gate].shape, generator=torch.Generator().manual_seed(1))).to(inputs[gate])


def limit_of_factors(inputs: Inputs, gate: str) -> None:
    """Set decays just below and just above 160 in fifteen tokens of a block, and keys of very different size."""
    steps = torch.linspace(10.4, 10.9, len(inputs[gate]), dtype=torch.float64)
    inputs[gate] = steps[:, None, None].expand(inputs[gate].shape).to(inputs[gate])
    sizes = 10 ** (2 * random(*inputs["k"].shape, seed=1))
    inputs["k"] = (inputs["k"] * sizes).clamp(-6e4, 6e4).to(inputs["k"].dtype)  # within fp16


def uneven() -> KDAOp:
    op = KDAOp(3, 16, 32)
    op.spoil = uneven_decay
    return op


SHAPES = {
    f"{heads}-{key_width}-{value_width}": partial(KDAOp, heads, key_width, value_width)
    for heads, (key_width, value_width) in product((1, 3), [(16, 16), (96, 192), (128, 128), (48, 256), (256, 80)])
}

HARD = {
    spoil.__name__: partial(harden, partial(KDAOp, 2, 64, 32), spoil)
    for spoil in (*SPOILS, uneven_decay, every_decay, limit_of_factors)
}

REFUSED: list[tuple[dict[str, Callable[[Tensor], Tensor]], str]] = [
    ({"q": lambda q: q[..., :24], "k": lambda k: k[..., :24]}, "K is 24, but head widths must be multiples of 16"),
    ({"v": lambda v: v[:, :1]}, "1 value heads cannot share 2 key heads"),
    (
        {"v": lambda v: v.repeat(1, 2, 1), "state": lambda state: state.repeat(1, 2, 1, 1)},
        r"v has shape \[3, 4, 16\] where the other arguments need \[3, 2, 16\]",
    ),
    ({"g": lambda g: g[..., 0]}, "g has shape"),
    ({"b": lambda b: b[:2]}, "b has shape"),
    ({"A_log": lambda A_log: A_log[:1]}, "A_log has shape"),
    ({"dt_bias": lambda dt_bias: dt_bias[0]}, r"dt_bias has shape \[32\] where the other arguments need \[64\]"),
    ({"dt_bias": lambda dt_bias: dt_bias[:1]}, "dt_bias has shape"),
    ({"state": Tensor.int}, "state is int32"),
]
"""Arguments of the op as it is by default, changed, and what is said of them."""
