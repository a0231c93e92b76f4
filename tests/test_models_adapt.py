"""Check loading: refused checkpoints, shared weights, and descriptions of layers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from mambacache.cli import main
from mambacache.kernels import StateTensor, state_bytes
from mambacache.models.adapt import MODEL_TYPES, adapt, load_model, model_skeleton, read_config
from mambacache.models.attention import ATTENTION
from mambacache.models.layer import KVLayer
from mambacache.models.projection import JoinedLinears, fuse
from mambacache.runner.kv_pages import kv_block_bytes
from mambacache.runner.sizing import weight_bytes
from runner_driver import Driver, Row
from selection import by_family
from tiny_models import TINY_MODELS, VOCABULARY, save_tiny_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny_model("qwen3_next", tmp_path / "model")


def change_weights(checkpoint: Path, drop: str = "", halve: str = "") -> None:
    path = checkpoint / "model.safetensors"
    weights = {name: weight for name, weight in load_file(path).items() if name != drop}
    if halve:
        weights[halve] = weights[halve][: len(weights[halve]) // 2].clone()
    save_file(weights, path, metadata={"format": "pt"})


def test_layouts_of_a_model_and_of_its_skeleton(checkpoint: Path) -> None:
    conv = StateTensor((3, 2 * 2 * 16 + 4 * 32), torch.float32)
    for model in (load_model(checkpoint), model_skeleton(checkpoint)):
        assert model.state_layers(torch.bfloat16) == [(conv, StateTensor((4, 32, 16), torch.bfloat16))] * 3
        assert model.kv_layers == (KVLayer(2, 32, 32, torch.float32),)
    skeleton = model_skeleton(checkpoint, dtype="bfloat16")
    assert skeleton.state_layers(torch.float32)[0][0].dtype == skeleton.kv_layers[0].dtype == torch.bfloat16
    assert {weight.device.type for weight in skeleton.module.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("name", "states", "kv_layer"),
    [
        (
            "kimi_linear",
            (StateTensor((3, 3 * 3 * 16), torch.bfloat16), StateTensor((3, 16, 16), torch.float32)),
            KVLayer(4, 24, 16, torch.bfloat16),
        ),
        ("lfm2", (StateTensor((2, 64), torch.bfloat16),), KVLayer(2, 16, 16, torch.bfloat16)),
        (
            "bamba",
            (StateTensor((3, 4 * 32 + 2 * 16), torch.bfloat16), StateTensor((4, 32, 16), torch.float32)),
            KVLayer(2, 16, 16, torch.bfloat16),
        ),
        (
            "nemotron_h",
            (StateTensor((3, 6 * 16 + 2 * 2 * 32), torch.bfloat16), StateTensor((6, 16, 32), torch.float32)),
            KVLayer(2, 32, 32, torch.bfloat16),
        ),
    ],
)
def test_layouts_of_other_families(
    name: str, states: tuple[StateTensor, ...], kv_layer: KVLayer, tmp_path: Path
) -> None:
    model = model_skeleton(save_tiny_model(name, tmp_path), dtype="bfloat16")
    assert model.state_layers(torch.float32) == [states] * 3
    assert model.kv_layers == (kv_layer,)


@pytest.mark.parametrize("name", by_family(TINY_MODELS))
def test_plan_of_every_model(name: str, tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` prints the sizes of a model before it is loaded. They must equal the loaded model's."""
    assert main(["plan", str(tiny_model(name)), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    model = load_model(tiny_model(name))
    sizes = {
        "weights": weight_bytes(model),
        "one state": state_bytes(model.state_layers(torch.float32)),
        "one token log": state_bytes(model.log_layers(torch.float32)),
        "one KV block": kv_block_bytes(model.kv_layers, 64),
    }
    for row, size in sizes.items():
        assert re.search(rf"^{row} +{size:,} bytes", printed, re.MULTILINE)
    assert bool(re.search("^KV blocks +none$", printed, re.MULTILINE)) == (not model.kv_layers)


def test_auto_dtype_is_float32_on_a_cpu_and_the_checkpoints_own_elsewhere(tmp_path: Path) -> None:
    checkpoint = save_tiny_model("qwen3_next", tmp_path)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert load_model(checkpoint).module.dtype == torch.float32
    assert load_model(checkpoint, dtype="float16").module.dtype == torch.float16
    assert model_skeleton(checkpoint, device="cuda").module.dtype == torch.bfloat16


def test_composite_checkpoints_say_that_only_their_text_part_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save_tiny_model("qwen3_5", tmp_path)
    with caplog.at_level(logging.WARNING):
        model = load_model(checkpoint)
    assert [message for message in caplog.messages if "only the text part" in message]
    assert model.config.model_type == "qwen3_5_text"
    assert not [name for name, _ in model.module.named_parameters() if "visual" in name]


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"holds no readable config\.json: give the directory of a checkpoint"):
            load_model(path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"holds no readable config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"model_type": "mamba2", "hidden_size": "x"}, "'hidden_size' expected int, got str"),
        ({"model_type": "mamba2", "num_heads": 7}, "must equal num_heads"),
        ({"model_type": "mamba2", "dtype": "wide"}, "no attribute 'wide'"),
        ({"model_type": ["mamba2"]}, "unhashable type"),
        (["mamba2"], "list"),
        (5, "'int' "),
    ],
)
def test_an_unusable_config_is_refused(
    tmp_path: Path, written: object, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"^the config\.json of .* cannot be used \(.*\): put the one") as raised:
        read_config(tmp_path)
    assert reason in str(raised.value) and "\n" not in str(raised.value)
    assert main(["plan", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"mambacache: {raised.value}"


def test_a_config_that_builds_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "num_attention_heads": 0}')
    with pytest.raises(ValueError, match=r"^the config\.json of .* cannot be used \(.*zero\): put the one") as raised:
        model_skeleton(tmp_path)
    assert main(["plan", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"mambacache: {raised.value}"


@pytest.mark.parametrize("model_type", ["llama", "lfm2_vl", "no_such_type", None])
def test_unknown_model_type(tmp_path: Path, model_type: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 64}))
    with pytest.raises(ValueError, match=f"model type {model_type!r} of .* is not supported: use one of .*qwen3_next"):
        read_config(tmp_path)


def test_weights_that_are_absent_or_unreadable(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"weights of .* cannot be read: put complete safetensors files there"):
        load_model(checkpoint)
    weights.unlink()
    with pytest.raises(ValueError, match=r"weights of .* cannot be read: put complete safetensors files there"):
        load_model(checkpoint)


def test_weights_that_do_not_fit_the_config(checkpoint: Path) -> None:
    change_weights(checkpoint, halve="model.norm.weight")
    with pytest.raises(ValueError, match=r"1 weights of .* missing or of another shape .* first is model.norm.weight"):
        load_model(checkpoint)
    change_weights(checkpoint, drop="model.layers.0.linear_attn.A_log", halve="")
    with pytest.raises(ValueError, match=r"2 weights of .* first is model.layers.0.linear_attn.A_log"):
        load_model(checkpoint)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "mamba"])
def test_other_activation_is_refused(name: str, tmp_path: Path) -> None:
    checkpoint = save_tiny_model(name, tmp_path, hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
        load_model(checkpoint)


def test_model_without_recurrent_layers_is_refused(tmp_path: Path) -> None:
    """Some checkpoints of a hybrid type have no recurrent layer."""
    checkpoint = save_tiny_model("granitemoehybrid", tmp_path, layer_types=["full_attention"] * 4)
    for load in (load_model, model_skeleton):
        with pytest.raises(ValueError, match="this granitemoehybrid model has attention layers only"):
            load(checkpoint)


def test_fuse_merges_plain_linears_and_calls_others() -> None:
    plain = [nn.Linear(8, rows, bias=False) for rows in (6, 4)]
    order = torch.randperm(10)
    x = torch.randn(5, 8)
    expected = torch.cat([linear(x) for linear in plain], dim=-1)
    fused = fuse(plain)
    assert isinstance(fused, nn.Linear)
    torch.testing.assert_close(fused(x), expected)
    torch.testing.assert_close(fuse(plain, order)(x), expected[:, order])
    with_bias = [plain[0], nn.Linear(8, 4)]
    joined = fuse(with_bias, order)
    assert isinstance(joined, JoinedLinears)
    torch.testing.assert_close(joined(x), torch.cat([linear(x) for linear in with_bias], dim=-1)[:, order])


class Opaque(nn.Module):
    """Stand in for a quantised linear: it can be called, and has no weight to read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inner = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        "qwen3_5_text",
        "olmo_hybrid",
        "falcon_mamba",
        "kimi_linear",
        "lfm2",
        "mamba2_bias",
        "falcon_h1_norm",
    ],
)
def test_projections_are_called_and_not_read(name: str, tmp_path: Path) -> None:
    checkpoint = save_tiny_model(name, tmp_path)
    module = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=ATTENTION).eval()
    for parent in list(module.modules()):
        if type(parent).__name__ == MODEL_TYPES[module.config.model_type].mixer:
            for child_name, child in list(parent.named_modules()):
                if isinstance(child, nn.Linear):
                    parent.set_submodule(child_name, Opaque(child))
    tokens = torch.randint(VOCABULARY, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = []
    for model in (load_model(checkpoint), adapt(module)):
        driver = Driver(model)
        logits.append(driver.logits([Row(driver.add(tokens), len(tokens), all_logits=True)]))
    assert (logits[0] - logits[1]).abs().max() < 1e-4
