"""Give the last layer of a dense recall model two experts, since vLLM serves no Qwen3-Next without experts.

Both experts are the layer's MLP with weight 1/2, and the shared expert is zero. Halves and their sums are exact in
floating point, so that the model's results are bitwise equal.

    python benchmarks/recall/experts.py mambacache/demo/model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

EXPERTS = 2
SHARED = 32
"""Width of the shared expert."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def with_experts(weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """Return a dense model's weights by name, with experts in `layer`."""
    mlp = f"model.layers.{layer}.mlp"
    dense = {name: weights[f"{mlp}.{name}.weight"] for name in PROJECTIONS}
    hidden = dense["gate_proj"].size(1)
    zeros = {"gate": (EXPERTS, hidden), "shared_expert_gate": (1, hidden)}
    zeros |= {"shared_expert.gate_proj": (SHARED, hidden), "shared_expert.up_proj": (SHARED, hidden)}
    zeros |= {"shared_expert.down_proj": (hidden, SHARED)}
    kept = {name: weight for name, weight in weights.items() if not name.startswith(f"{mlp}.")}
    experts = {
        f"{mlp}.experts.{number}.{name}.weight": weight.clone()
        for number in range(EXPERTS)
        for name, weight in dense.items()
    }
    return kept | experts | {f"{mlp}.{name}.weight": torch.zeros(shape) for name, shape in zeros.items()}


def give_experts(directory: Path) -> None:
    """Change a checkpoint in place.

    Raises:
        ValueError: the model has experts already.
    """
    config = json.loads((directory / "config.json").read_text())
    if config["num_experts"]:
        raise ValueError(f"{directory} has {config['num_experts']} experts: give a dense model.")
    last = config["num_hidden_layers"] - 1
    config |= {
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "mlp_only_layers": list(range(last)),
        "moe_intermediate_size": config["intermediate_size"],
        "shared_expert_intermediate_size": SHARED,
    }
    file = directory / "model.safetensors"
    save_file(with_experts(load_file(file), last), file, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="checkpoint to change in place")
    give_experts(parser.parse_args().directory)
