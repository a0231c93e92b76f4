"""The demo's model has experts for vLLM's sake, and computes what the dense model that was trained computes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mambacache.demo import MODEL

DENSE = "58210577214381acc3ef413bfc7187eff71c18b63b62f58ea371358b5f435f5f"
"""The digest of the dense model's weights, as they were trained."""


def digest(weights: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].numpy().tobytes())
    return found.hexdigest()


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """The model as it was before it had experts: its last layer has the first of them as its MLP."""
    directory = tmp_path / "dense"
    shutil.copytree(MODEL, directory)
    config = json.loads((MODEL / "config.json").read_text())
    changes = {"num_experts": 0, "mlp_only_layers": list(range(config["num_hidden_layers"]))}
    (directory / "config.json").write_text(json.dumps(config | changes))
    weights = load_file(MODEL / "model.safetensors")
    weights = {name.replace(".experts.0.", "."): weight for name, weight in weights.items()}
    added = (".experts.1.", ".mlp.gate.", ".shared_expert")
    weights = {name: weight for name, weight in weights.items() if not any(part in name for part in added)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_the_dense_weights_are_those_that_were_trained(dense: Path) -> None:
    assert digest(load_file(dense / "model.safetensors")) == DENSE


def test_the_experts_leave_every_logit_as_it_was(dense: Path) -> None:
    tokens = torch.randint(0, 136, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (dense, MODEL)]
    assert torch.equal(*logits)


def test_the_script_makes_the_checkpoint_that_is_published(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks" / "recall"))
    from experts import give_experts

    give_experts(dense)
    published = load_file(MODEL / "model.safetensors")
    made = load_file(dense / "model.safetensors")
    assert made.keys() == published.keys() and all(torch.equal(made[name], published[name]) for name in made)
    assert json.loads((dense / "config.json").read_text()) == json.loads((MODEL / "config.json").read_text())
    with pytest.raises(ValueError, match="has 2 experts: give a dense model"):
        give_experts(dense)
