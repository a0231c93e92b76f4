"""Start-up: how memory is divided, and what is refused with a sentence that says what to change."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mambacache import LLM, EngineConfig
from mambacache.models.adapt import Model, model_skeleton
from mambacache.runner import sizing
from mambacache.runner.sizing import SHARES, plan_memory

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no step": ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0: set it to 1 or more"),
    "no request": ({"max_num_seqs": 0}, "max_num_seqs is 0: set it to 1 or more"),
    "no token": ({"max_model_len": 0}, "max_model_len is 0: set it to 1 or more"),
    "negative checkpoints": ({"checkpoint_budget_bytes": -1}, "checkpoint_budget_bytes is -1: set it to 0 or more"),
    "negative KV": ({"kv_cache_bytes": -1}, "kv_cache_bytes is -1: set it to 0 or more"),
    "less than one KV block": ({"kv_cache_bytes": 1000}, "one KV block takes 32,768 bytes: raise kv_cache_bytes"),
    "KV beyond memory": ({"kv_cache_bytes": 1 << 60}, "are free: lower kv_cache_bytes, checkpoint_budget_bytes or"),
    "checkpoints beyond memory": ({"checkpoint_budget_bytes": 1 << 60}, "are free: lower kv_cache_bytes"),
    "block size": ({"block_size": 96}, "block_size is 96: set it to a positive multiple of 64"),
    "interval": ({"checkpoint_interval": 100}, "checkpoint_interval is 100: set it to 0 or a multiple of 64"),
    "drafts": ({"max_draft_tokens": 8}, "max_draft_tokens is 8: set it between 0 and 7"),
    "dtype": ({"dtype": "float64"}, "dtype is 'float64': choose auto, float32"),
    "state dtype": ({"state_dtype": "auto"}, "state_dtype is 'auto': choose float32"),
    "device": ({"device": "tpu"}, "device is 'tpu': set it to auto, cpu or cuda"),
    "type": ({"max_num_seqs": "8"}, "max_num_seqs is '8': set it to an integer"),
    "draft source": ({"draft": 5}, "draft is 5: give a function"),
}


def refused(model: Path, message: str, kind: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(kind, match=message) as error:
        LLM(model, **{"device": "cpu", **options})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", OPTIONS)
def test_options(tiny_model: Callable[[str], Path], case: str) -> None:
    options, message = OPTIONS[case]
    refused(tiny_model("qwen3_next"), message, **options)


def test_unknown_option(tiny_model: Callable[[str], Path]) -> None:
    message = "no option 'max_seqs': choose from .*max_num_seqs"
    refused(tiny_model("qwen3_next"), message, TypeError, max_seqs=3)


def test_absent_device(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(tiny_model("qwen3_next"), "there is no CUDA device here: set it to auto or cpu", device="cuda")


@pytest.fixture
def checkpoint(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    """A copy of a checkpoint, to be spoilt."""
    for path in tiny_model("qwen3_next").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_no_config(tmp_path: Path) -> None:
    refused(tmp_path, "holds no readable config.json: give the directory of a checkpoint")


def test_a_model_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(Path("nobody/nothing"), "^nobody/nothing is not cached, and HF_HUB_OFFLINE keeps it from being fetched")


def test_a_file_in_place_of_its_directory(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    refused(path, f"^{path} is a file: give the directory that holds it")


@pytest.mark.parametrize("model_type", ["llama", "no such type"])
def test_unknown_model_type(checkpoint: Path, model_type: str) -> None:
    change_config(checkpoint, model_type=model_type)
    refused(checkpoint, f"model type '{model_type}' .* is not supported: use one of .*qwen3_next")


def test_missing_weights(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    refused(checkpoint, "weights of .* cannot be read: put complete safetensors files there")
    tensors.pop("model.norm.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    refused(checkpoint, "1 weights .* are missing .* model.norm.weight: use a complete checkpoint")


def test_weights_of_another_shape(checkpoint: Path) -> None:
    change_config(checkpoint, vocab_size=170)
    refused(checkpoint, "of another shape than its config says, .*: use a complete checkpoint")


# --- division of memory ---


@pytest.fixture(scope="module")
def skeleton(tiny_model: Callable[[str], Path]) -> Model:
    return model_skeleton(tiny_model("qwen3_next"))


@pytest.mark.parametrize("drafts", [0, 3])
def test_default_budgets_stay_within_their_share(skeleton: Model, drafts: int) -> None:
    """However little memory there is: if one request fits, there are states and pages for it."""
    config = EngineConfig("model", device="cpu", max_draft_tokens=drafts)
    ample = plan_memory(config, skeleton, 1 << 40)
    state, page = ample.state_bytes, ample.kv_block_bytes
    least = 3 * state + ample.log_bytes + page
    with pytest.raises(ValueError, match=f"one request takes {least:,} bytes .* free memory"):
        plan_memory(config, skeleton, int((least - 1) / SHARES["cpu"][0]))
    for share in (least, least + page, 2 * least, 5 * least, 30 * least, 300 * least, 1000 * least):
        sizes = plan_memory(config, skeleton, int(share / SHARES["cpu"][0]))
        assert sizes.device_bytes <= share
        assert sizes.max_num_seqs >= 1 and sizes.num_kv_blocks >= 1
        assert sizes.num_running_states == sizes.max_num_seqs + 2
    assert sizes.max_num_seqs == ample.max_num_seqs == 64 and sizes.max_checkpoints > 100


def test_the_default_is_a_state_for_every_7000_tokens_of_kv(skeleton: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they have memory of their own; where they share it they begin with that."""
    config = EngineConfig("model", device="cpu", max_model_len=1000)
    monkeypatch.setattr(sizing, "MAX_DEFAULT_BLOCKS", 1 << 40)
    monkeypatch.setattr(sizing, "state_bytes", lambda layers: 77 << 20)
    assert plan_memory(config, skeleton, 1 << 40).slab is not None
    monkeypatch.setattr(sizing, "MOST_LOST", -1)
    sizes = plan_memory(config, skeleton, 1 << 40)
    tokens, state, page = sizes.num_kv_blocks * config.block_size, sizes.state_bytes, sizes.kv_block_bytes
    assert tokens / sizes.max_checkpoints == pytest.approx(7000, rel=0.01)
    one = EngineConfig("model", device="cpu", max_num_seqs=1)  # beside what runs less than two longest requests fit
    sizes = plan_memory(one, skeleton, int((3 * state + sizes.log_bytes + 256 * page) / SHARES["cpu"][0]))
    assert sizes.max_model_len == 256 * 64 and sizes.num_kv_blocks == 128
    monkeypatch.setattr(sizing, "state_bytes", lambda layers: 256)
    sizes = plan_memory(config, skeleton, 1 << 40)
    assert sizes.num_kv_blocks * page == pytest.approx(15 * sizes.max_checkpoints * 256, rel=0.01)


def test_too_little_memory(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model("qwen3_next")
    weights = sizing.weight_bytes(model_skeleton(directory))
    for free, message in ((100_000, "one request takes .* free memory"), (0, f"the weights take {weights:,} bytes")):
        monkeypatch.setattr("mambacache.engine.parts.free_memory", lambda device, free=free: weights + free)
        refused(directory, message)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({}, "free memory, or take a device with more"),
        ({"gpu_memory_utilization": 1}, "free memory, or take a device with more"),
        ({"gpu_memory_utilization": 0.0002}, "free memory, or raise gpu_memory_utilization, which is 0.0002"),
    ],
)
def test_advice_where_there_is_too_little_memory(skeleton: Model, options: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_memory(EngineConfig("m", device="cpu", **options), skeleton, 1000)
    assert str(error.value).endswith(f" are available for them: {advice}")


def test_lowered_number_of_requests(skeleton: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sizes = plan_memory(EngineConfig("model", device="cpu"), skeleton, 4_000_000)
    assert sizes.max_num_seqs < 64
    assert f"max_num_seqs lowered from 64 to {sizes.max_num_seqs}" in caplog.text


def test_kv_memory_without_attention_is_warned_of(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("qwen3_next", "mamba"):
        directory = tiny_model(name)
        config = EngineConfig(directory, device="cpu", kv_cache_bytes=1 << 20)
        plan_memory(config, model_skeleton(directory, config.dtype), free_bytes=1 << 30)
        assert ("kv_cache_bytes is 1048576 and not used" in caplog.text) == (name == "mamba")


def test_small_steps_are_warned_of(tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        LLM(tiny_model("qwen3_next"), device="cpu", max_num_seqs=4, max_num_batched_tokens=68)
        assert "max_num_batched_tokens" not in caplog.text
        LLM(tiny_model("qwen3_next"), device="cpu", max_num_seqs=4, max_num_batched_tokens=67)
        assert "max_num_batched_tokens is 67" in caplog.text and "set it to 68 or more" in caplog.text
        caplog.clear()
        LLM(tiny_model("qwen3_next"), device="cpu", max_num_seqs=4, max_num_batched_tokens=79, speculative="ngram")
    assert "set it to 80 or more" in caplog.text, "drafts are tokens of a step too"


def test_budgets_are_taken_as_given(skeleton: Model) -> None:
    config = EngineConfig("m", device="cpu", checkpoint_budget_bytes=100_000, kv_cache_bytes=100_000, max_num_seqs=5)
    sizes = plan_memory(config, skeleton, 1 << 30)
    assert (sizes.max_checkpoints, sizes.num_kv_blocks, sizes.num_running_states) == (3, 3, 7)
    assert plan_memory(EngineConfig("m", enable_prefix_caching=False), skeleton, 1 << 30).max_checkpoints == 0


def test_that_nothing_is_cached_is_warned_of(skeleton: Model, caplog: pytest.LogCaptureFixture) -> None:
    """Check the warning wherever cached states get no memory, unless the user asked for that."""
    free = 1 << 30
    ample = plan_memory(EngineConfig("m", device="cpu"), skeleton, free)
    state, share = ample.state_bytes, int(free * SHARES["cpu"][0])
    least = int((3 * state + ample.log_bytes + ample.kv_block_bytes) / SHARES["cpu"][0])
    cases: list[tuple[int, dict[str, Any], str]] = [
        (free, {"kv_cache_bytes": share}, f"0 bytes are left for cached states and one takes {state}: nothing is "
         f"cached, lower kv_cache_bytes, which is {share}, or set checkpoint_budget_bytes"),
        (least + 4, {}, "nothing is cached, free memory, take a device with more, or set checkpoint_budget_bytes"),
        (free, {"checkpoint_budget_bytes": 10}, "checkpoint_budget_bytes is 10 and one state takes"),
        (free, {"kv_cache_bytes": share, "checkpoint_budget_bytes": 0}, ""),
        (free, {"kv_cache_bytes": share, "enable_prefix_caching": False}, ""),
    ]  # fmt: skip
    for bytes_free, options, message in cases:
        caplog.clear()
        assert plan_memory(EngineConfig("m", device="cpu", **options), skeleton, bytes_free).max_checkpoints == 0
        assert ("nothing is cached" in caplog.text) == bool(message) and message in caplog.text


def test_free_memory() -> None:
    assert sizing.free_memory("cpu") > 1 << 20


def test_collections_skip_imported_objects_and_free_engines(tiny_model: Callable[[str], Path]) -> None:
    gc.unfreeze()
    gc.collect()
    before = len(gc.get_objects())
    llm = LLM(tiny_model("qwen3_next"), device="cpu", max_num_seqs=2, max_model_len=256)
    assert gc.get_freeze_count() > before // 2
    weight = weakref.ref(next(llm.runner.model.module.parameters()))
    del llm
    gc.collect()
    assert weight() is None
