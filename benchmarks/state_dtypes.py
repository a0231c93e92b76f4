"""Measure errors of prefill by the dtype of states, beside float64.

    python benchmarks/state_dtypes.py [--tokens 4096] [--json OUT]

Activations are random bfloat16, and the ops are those in plain torch, which round where the kernels do: operands of
products to bfloat16, and states after each chunk of 64 tokens. Errors are relative root mean squares.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from about import about
from torch import Tensor

from mambacache import CacheConfig, PrefixCache
from mambacache.kernels import StateIndices, reference
from mambacache.plan import CHUNK

HEADS, WIDTH = 2, 128
DTYPES = torch.float32, torch.float16, torch.bfloat16
OPS = "gated_delta_rule", "kda", "ssd", "selective_scan"


def indices_of(tokens: int) -> tuple[StateIndices, int]:
    """Return the indices of a prompt, and the block of its state."""
    cache = PrefixCache(CacheConfig(num_state_blocks=2, has_attention=False))
    cache.add("prompt", [0] * tokens)
    cache.admit("prompt")
    step = cache.allocate("prompt", tokens)
    assert step is not None, "there is a block for it"
    plan = cache.plan([step])
    return StateIndices.from_arrays(plan.arrays, "cpu"), step.dst


def inputs(op: str, tokens: int) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return an op's tensors before the state, and the shape of a state."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape).bfloat16()

    heads, zeros = (HEADS, WIDTH), torch.zeros(HEADS)
    if op == "gated_delta_rule":
        return (*(normal(*heads) for _ in "qkv"), normal(HEADS), normal(HEADS), zeros - 3, zeros), (*heads, WIDTH)
    if op == "kda":
        gates = normal(*heads), normal(HEADS), zeros - 3, torch.zeros(HEADS * WIDTH)
        return (*(normal(*heads) for _ in "qkv"), *gates), (*heads, WIDTH)
    if op == "ssd":
        A, B, C = zeros - 0.05, normal(1, WIDTH), normal(1, WIDTH)
        return (normal(*heads), normal(HEADS), A, B, C, None, None, None), (*heads, WIDTH)
    A, B, C = torch.full((WIDTH, 16), -0.05), normal(16), normal(16)
    return (normal(WIDTH), normal(WIDTH), A, B, C, torch.zeros(WIDTH), None, None), (WIDTH, 16)


def run(op: str, tensors: tuple[Any, ...], state: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state."""
    indices, block = indices_of(tokens)
    rounding = {} if op == "selective_scan" or state.dtype == torch.float64 else {"operand_dtype": torch.bfloat16}
    y = getattr(reference, op)(*tensors, state, (), indices, **rounding)
    return y.double(), state[block].double()


def measure(op: str, tokens: int) -> dict[str, dict[str, float]]:
    """Return the errors of outputs and of the last state, by the dtype of states."""
    torch.manual_seed(0)
    tensors, shape = inputs(op, tokens)
    doubles = tuple(x.double() if isinstance(x, Tensor) else x for x in tensors)
    right = run(op, doubles, torch.zeros(3, *shape, dtype=torch.float64), tokens)
    errors = {}
    for dtype in DTYPES:
        found = run(op, tensors, torch.zeros(3, *shape, dtype=dtype), tokens)
        pairs = zip(("outputs", "state"), found, right, strict=True)
        errors[str(dtype).removeprefix("torch.")] = {
            what: float(((x - y).square().mean() / y.square().mean()).sqrt()) for what, x, y in pairs
        }
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64 * CHUNK)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    errors = {op: measure(op, args.tokens) for op in OPS}
    for op, dtypes in errors.items():
        print(op.ljust(20), *(f"{name} {each['outputs']:.1e} {each['state']:.1e};" for name, each in dtypes.items()))
    if args.json is not None:
        args.json.write_text(json.dumps({**about("torch"), "tokens": args.tokens, "errors": errors}, indent=1) + "\n")


if __name__ == "__main__":
    main()
