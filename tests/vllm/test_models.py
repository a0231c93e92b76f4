"""Check which models are served, and which are left to vLLM."""

from __future__ import annotations

import ast
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.model_executor.models.registry import _ModelInfo
from watched import run

from mambacache.vllm import models
from mambacache.vllm.config import is_cpu
from mambacache.vllm.contract import HOOKS, LAYERS

VLLM = Path(find_spec("vllm").origin).parent
MARKS = {"HasInnerState", "IsHybrid"}
HIDDEN = {"is_hybrid", "is_attention_free", "has_inner_state"}
NEWER = {"AliceAIForCausalLM", "ClefFlashForJointSchema", "MiniCPMOcrForConditionalGeneration"}
"""vLLM 0.33 has these architectures, and 0.32 has not."""
OF_REGISTERED_PARTS = {
    name
    for name, module in models.ARCHITECTURES.items()
    if module in ("lfm2_vl", "nano_nemotron_vl", "vllm.models.kimi_k3")
}
"""The files of these import no layers: they ask for another served class by name, or lie elsewhere."""


@cache
def bases() -> dict[str, set[str]]:
    """Return the bases of all model classes of the installed vLLM, by name, from its files: few can be imported."""
    found: dict[str, set[str]] = {}
    for folder in ("model_executor/layers/mamba", "model_executor/models", "models"):
        for path in (VLLM / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, set()).update(each.id for each in node.bases if hasattr(each, "id"))
    return found


def imported(module: str, seen: set[str]) -> set[str]:
    """Return the names that a file of a model imports, with the imports of the files it imports from."""
    path = VLLM.joinpath(*module.split(".")).with_suffix(".py")
    if module in seen or not path.exists():
        return set()
    seen.add(module)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {each.name for each in node.names}
            near = f"{module.rpartition('.')[0]}.{node.module}" if node.level else node.module.removeprefix("vllm.")
            found |= imported(near, seen) if near.startswith("model_executor.models.") else set()
    return found


def registered() -> dict[str, str]:
    """Return the class of each architecture that vLLM knows."""
    found = {}
    for node in ast.walk(ast.parse((VLLM / "model_executor/models/registry.py").read_text())):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(value, ast.Tuple) and isinstance(key, ast.Constant) and len(value.elts) == 2:
                    found[key.value] = value.elts[1].value
    return found


def test_each_architecture_with_recurrent_layers_is_served_or_left_with_a_reason() -> None:
    known = bases()

    def recurrent(name: str, *below: str) -> bool:
        return name in MARKS or any(recurrent(each, name, *below) for each in known.get(name, set()) - {name, *below})

    found = {architecture for architecture, name in registered().items() if recurrent(name)}
    assert len(found) > 30 and not models.ARCHITECTURES.keys() & models.LEFT.keys()
    assert found <= models.ARCHITECTURES.keys() | models.LEFT.keys()
    assert (models.ARCHITECTURES.keys() | models.LEFT.keys()) - NEWER <= found


def test_a_served_class_has_no_recurrent_layer_but_ours() -> None:
    known = bases()
    ours = {name.partition(".")[0] for file in HOOKS if file.startswith(LAYERS) for name in HOOKS[file]} - {"MambaBase"}

    def recurrent(name: str) -> bool:
        return name == "MambaBase" or any(map(recurrent, known.get(name, set()) - {name}))

    layers = {name for name in known if recurrent(name)} - {"MambaBase"}
    assert ours < layers
    for name in models.ARCHITECTURES.keys() & registered().keys():
        found = imported(f"model_executor.models.{models.ARCHITECTURES[name]}", set()) & layers
        assert found <= ours, (name, found)
        assert found or name in OF_REGISTERED_PARTS, name


@pytest.mark.skipif(not is_cpu(), reason="of the next vLLM there are files alone")
def test_a_served_class_differs_from_vllms_own_in_three_facts_alone() -> None:
    served = models.ARCHITECTURES.keys() & registered().keys()
    assert models.ARCHITECTURES.keys() - served == NEWER
    for name in served:
        cls = getattr(models, name)
        ours, own = (asdict(_ModelInfo.from_model_cls(each)) for each in (cls, cls.__mro__[2]))
        assert {fact for fact in ours if ours[fact] != own[fact]} <= HIDDEN | {"architecture"}, name
        assert own["is_hybrid"] or own["is_attention_free"], name
        assert not any(ours[fact] for fact in HIDDEN), name


@pytest.mark.skipif(not is_cpu(), reason="of the next vLLM there are files alone")
def test_a_model_that_is_left_to_vllm_is_as_vllm_alone_would_have_it(tmp_path: Path) -> None:
    run("left_run.py", "jamba", tmp_path)
