"""Anything that states depend on changes the identity, and nothing else does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mambacache
from mambacache import EngineConfig
from mambacache.engine.parts import model_identity
from mambacache.models.adapt import Model, load_model
from mambacache.runner import identity as identity_module
from mambacache.runner.identity import source_digest, weights_digest

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Model:
    return load_model(tiny_model("qwen3_next"), "float32", "cpu")


def of(model: Model, **options: Any) -> str:
    return model_identity(model, EngineConfig("anywhere", **options), CPU)


def test_a_checkpoint_may_be_moved(model: Model, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    moved = Path(shutil.copytree(tiny_model("qwen3_next"), tmp_path / "moved"))
    assert of(load_model(moved, "float32", "cpu")) == of(model) == of(model, max_num_seqs=3, seed=1)


@pytest.mark.parametrize("options", [{"block_size": 128}, {"state_dtype": "bfloat16"}])
def test_another_layout_changes_the_identity(model: Model, options: dict[str, Any]) -> None:
    assert of(model, **options) != of(model)


def test_another_dtype_of_weights_changes_the_identity(model: Model, tiny_model: Callable[[str], Path]) -> None:
    assert of(load_model(tiny_model("qwen3_next"), "bfloat16", "cpu")) != of(model)


def test_another_setting_changes_the_identity(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(model)
    monkeypatch.setattr(model.config, "rms_norm_eps", 1e-5)
    assert of(model) != before


def test_other_versions_change_the_identity(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, digest = of(model), source_digest()
    version = identity_module.version
    monkeypatch.setattr(identity_module, "version", lambda name: "7" if name == "transformers" else version(name))
    assert of(model) != before
    monkeypatch.undo()
    monkeypatch.setattr(identity_module, "source_digest", lambda: "another")
    assert of(model) != before
    monkeypatch.undo()

    copy = tmp_path / "copy"
    shutil.copytree(Path(mambacache.__file__).parent, copy / "mambacache")
    shutil.copytree(Path(identity_module.kernels.__file__).parent, copy / "kernels")
    monkeypatch.setattr(identity_module, "__file__", str(copy / "mambacache" / "runner" / "identity.py"))
    monkeypatch.setattr(identity_module.kernels, "__file__", str(copy / "kernels" / "__init__.py"))
    assert source_digest() == digest
    for file in ("mambacache/__init__.py", "kernels/gpu/ssd/decode.py"):
        text = (copy / file).read_text() if (copy / file).exists() else ""
        (copy / file).write_text(text + "# another\n")
        assert source_digest() != digest
        digest = source_digest()


def change(tensor: torch.Tensor, how: str) -> None:
    """Change float32 weights as little as possible, or so that their sums would stay."""
    flat, bits = tensor.view(-1), tensor.view(-1).view(torch.int32)
    if how == "one value":
        bits[flat.numel() // 2] ^= 1
    elif how == "the last":
        bits[-1] ^= 1
    elif how == "all signs":
        flat.neg_()
    elif how == "two signs":
        flat[1], flat[3] = -flat[1], -flat[3]
    elif how == "two places":
        flat[[0, 4]] = flat[[4, 0]]
    elif how == "two neighbours":
        bits[0] += 1
        bits[2] -= 1


@pytest.mark.parametrize("how", ["one value", "the last", "all signs", "two signs", "two places", "two neighbours"])
def test_other_weights_change_the_identity(tiny_model: Callable[[str], Path], how: str) -> None:
    model = load_model(tiny_model("mamba2"), "float32", "cpu")
    before, kept = of(model), {name: each.clone() for name, each in model.module.state_dict().items()}
    assert before == of(model)
    assert all(torch.equal(each, kept[name]) for name, each in model.module.state_dict().items())
    with torch.no_grad():
        change(next(each for each in model.module.parameters() if each.numel() > 100).data, how)
    assert of(model) != before


def test_every_byte_of_every_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check tensors of any length, both sides of each cut, zeros at the end, and empty tensors."""
    monkeypatch.setitem(identity_module.WORDS, "cpu", 2)

    def digest(*tensors: torch.Tensor) -> str:
        module = torch.nn.Module()
        for number, tensor in enumerate(tensors):
            module.register_buffer(f"t{number}", tensor)
        return weights_digest(module)

    digests = {digest(torch.empty(0)), digest(torch.empty(0, 3)), digest(), digest(torch.tensor(0, dtype=torch.uint8))}
    for length in range(1, 40):
        zeros = torch.zeros(length, dtype=torch.uint8)
        digests.add(digest(zeros))
        for place in range(length):
            changed = zeros.clone()
            changed[place] = 128
            digests.add(digest(changed))
    assert len(digests) == 4 + sum(1 + length for length in range(1, 40))
    square = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert digest(square.t()) == digest(square.t().contiguous()) != digest(square)
    assert digest(square, square + 1) != digest(square + 1, square)


@pytest.mark.gpu
def test_other_weights_on_a_gpu_change_the_identity() -> None:
    module = torch.nn.Linear(10_000, 3_333, dtype=torch.bfloat16, device="cuda")
    digests = {weights_digest(module) for _ in range(3)}
    for place in ((0, 0), (1666, 77), (3332, 9_999)):
        with torch.no_grad():
            module.weight[place] = -module.weight[place]
        digests.add(weights_digest(module))
    assert len(digests) == 4
